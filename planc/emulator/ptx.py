"""Reads PTX: in goes the text of a module, out come its kernels as parameters, registers and decoded instructions."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

from planc.errors import PlancError

WIDTH = {
    "pred": 0, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4,
    "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "f32x2": 8, "b128": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Reg:
    """A register by slot; `width` is its bytes, 0 for a predicate; `negated` for the operand !%p."""

    slot: int
    width: int
    negated: bool = False


@dataclass(frozen=True)
class Imm:
    """A literal as its bits, sign-extended to 64; `real` when it was written as a float."""

    bits: int
    real: bool = False


@dataclass(frozen=True)
class Special:
    """A read-only register such as tid.x."""

    name: str


@dataclass(frozen=True)
class Sym:
    """The address of a parameter or shared variable, or a label."""

    name: str


@dataclass(frozen=True)
class Vec:
    """{a, b, ..}"""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """a|b, two results."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Mem:
    """[base+offset], or [base, {coordinates}] of a tensor."""

    base: Operand
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Sink:
    """_, a result that nobody wants."""


Operand = Reg | Imm | Special | Sym | Vec | Pair | Mem | Sink


@dataclass(frozen=True)
class Instruction:
    """One instruction: the opcode cut at its dots, its guard, operands, the block that a branch goes to, its text."""

    parts: tuple[str, ...]
    guard: Reg | None
    operands: tuple[Operand, ...]
    target: int | None
    text: str

    @property
    def name(self) -> str:
        """The first part of the opcode."""
        return self.parts[0]

    @property
    def type(self) -> str:
        """The last part of the opcode."""
        return self.parts[-1]


@dataclass(frozen=True)
class Param:
    """A kernel parameter at its offset in PTX's own layout."""

    name: str
    offset: int
    size: int


@dataclass
class Kernel:
    """An entry: its registers are slots with a width, a branch's target is an index of `code` (len(code): the end)."""

    name: str
    params: list[Param]
    threads: int | None  # .reqntid
    code: list[Instruction] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    shared: dict[str, int] = field(default_factory=dict)  # variable -> address
    static_shared: int = 0
    target: str = ""

    @property
    def param_bytes(self) -> int:
        """Size of the parameter buffer."""
        return max((p.offset + p.size for p in self.params), default=0)


_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{")
_PARAM = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)(.*?)\s([\w$]+)(?:\[(\d+)\])?$", re.S)
_SHARED = re.compile(r"(\.extern\s+)?\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?\s*;")
_LABEL = re.compile(r"([\w$]+)\s*:(?!:)")
_OPERAND = re.compile(r"\[[^\]]*\]|\{[^}]*\}|[^,{}\[\]\s][^,{}\[\]]*")
_NUMBER = re.compile(r"(-?)(0x[0-9a-fA-F]+|\d+)U?$")
_SPECIAL = re.compile(r"%(tid|ntid|ctaid|nctaid)\.[xyz]$|%(laneid|warpid|nwarpid|clock|clock64|globaltimer)$")
_NO_TARGET = -1


def parse(text: str) -> dict[str, Kernel]:
    """The kernels of a module by name. PlancError when it has device functions or what else is not emulated."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    text = re.sub(r"^\s*\.(loc|file)\b[^\n]*$", "", text, flags=re.M)
    if re.search(r"\.func\s", text):
        raise PlancError("the PTX has device functions; the emulator runs kernels that are inlined whole")
    target = re.search(r"\.target\s+(\w+)", text)
    kernels = {}
    entries = list(_ENTRY.finditer(text))
    outside = text[: entries[0].start()] if entries else ""
    for entry in entries:
        kernel = Kernel(entry[1], _params(entry[2]), _threads(entry[3]), target=target[1] if target else "")
        body = text[entry.end() : _end_of_body(text, entry.end())]
        _place_shared(kernel, outside + body)
        _Body(kernel).read(body)
        kernels[kernel.name] = kernel
    return kernels


def _end_of_body(text: str, start: int) -> int:
    depth = 1
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return start + brace.start()
    raise PlancError("the PTX ends within a kernel")


def _params(text: str) -> list[Param]:
    params, offset = [], 0
    for part in filter(None, (p.strip() for p in text.split(","))):
        match = _PARAM.match(part)
        if match is None:
            raise PlancError(f"the PTX parameter {part!r} is not understood")
        align, kind, _, name, count = match.groups()
        size = WIDTH[kind] * int(count or 1)
        step = int(align) if align and count else WIDTH[kind]
        offset = -(-offset // step) * step
        params.append(Param(name, offset, size))
        offset += size
    return params


def _threads(text: str) -> int | None:
    match = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", text)
    return int(match[1]) * int(match[2] or 1) * int(match[3] or 1) if match else None


def _place_shared(kernel: Kernel, text: str) -> None:
    """Static variables first; all extern ones name the dynamic memory behind them."""
    found = list(_SHARED.finditer(text))
    at = 0
    for match in (m for m in found if not m[1]):
        step = int(match[2] or WIDTH[match[3]])
        at = -(-at // step) * step
        kernel.shared[match[4]] = at
        at += WIDTH[match[3]] * int(match[5] or 1)
    kernel.static_shared = at
    for match in (m for m in found if m[1]):
        step = int(match[2] or 1)
        kernel.shared[match[4]] = -(-at // step) * step


class _Scope:
    """Names that a pair of braces declares; inline assembly repeats them."""

    def __init__(self, parent: _Scope | None) -> None:
        self.parent = parent
        self.registers: dict[str, Reg] = {}
        self.labels: dict[str, int] = {}

    def label(self, name: str) -> int | None:
        found = self.labels.get(name)
        return self.parent.label(name) if found is None and self.parent else found

    def register(self, name: str) -> Reg | None:
        found = self.registers.get(name)
        return self.parent.register(name) if found is None and self.parent else found


class _Body:
    """Reads the statements of a kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.scope = _Scope(None)
        self.families: dict[str, int] = {}  # %r<217> declares %r0 .. %r216: prefix -> width
        self.jumps: dict[int, tuple[str, _Scope]] = {}

    def read(self, text: str) -> None:
        at, end = 0, len(text)
        while at < end:
            char = text[at]
            if char.isspace() or char == ";":
                at += 1
            elif char == "{":
                self.scope = _Scope(self.scope)
                at += 1
            elif char == "}":
                assert self.scope.parent is not None
                self.scope = self.scope.parent
                at += 1
            elif label := _LABEL.match(text, at):
                self.scope.labels[label[1]] = len(self.kernel.code)
                at = label.end()
            else:
                stop = text.find(";", at)
                stop = end if stop < 0 else stop
                self.statement(" ".join(text[at:stop].split()))
                at = stop + 1
        self.resolve()

    def statement(self, text: str) -> None:
        if text.startswith(".reg"):
            self.declare(text)
        elif text.startswith((".pragma", ".shared", ".extern")):
            return
        elif text.startswith("."):
            raise PlancError(f"{self.kernel.name}: the PTX directive {text!r} is not emulated")
        else:
            self.instruction(text)

    def declare(self, text: str) -> None:
        _, kind, names = text.split(maxsplit=2)
        width = WIDTH[kind[1:]]
        for name in (n.strip() for n in names.split(",")):
            if family := re.match(r"(%?\w+)<\d+>$", name):
                self.families[family[1]] = width
            else:
                self.scope.registers[name] = self.new(width)

    def new(self, width: int) -> Reg:
        self.kernel.widths.append(width)
        return Reg(len(self.kernel.widths) - 1, width)

    def instruction(self, text: str) -> None:
        guard, rest = None, text
        if match := re.match(r"@(!?)\s*([%\w]+)\s+", text):
            guard, rest = self.guard(match[2], bool(match[1])), text[match.end() :]
        opcode, _, arguments = rest.partition(" ")
        parts = tuple(opcode.split("."))
        operands = tuple(self.operand(a.strip()) for a in _OPERAND.findall(arguments) if a.strip())
        if parts[0] == "bra":
            self.jumps[len(self.kernel.code)] = (arguments.strip(), self.scope)
        self.kernel.code.append(Instruction(parts, guard, operands, None, text))

    def guard(self, name: str, negated: bool) -> Reg:
        found = self.register(name)
        if found is None:
            raise PlancError(f"{self.kernel.name}: the PTX guard {name} is not declared")
        return Reg(found.slot, found.width, negated)

    def register(self, name: str) -> Reg | None:
        found = self.scope.register(name)
        if found is None and (family := re.match(r"(%?[A-Za-z_$]+)\d+$", name)) and family[1] in self.families:
            top = self.scope
            while top.parent is not None:
                top = top.parent
            found = top.registers[name] = self.new(self.families[family[1]])
        return found

    def operand(self, text: str) -> Operand:
        if text[0] == "{":
            return Vec(tuple(self.operand(t.strip()) for t in text[1:-1].split(",")))
        if text[0] == "[":
            return self.memory(text[1:-1].strip())
        if "|" in text:
            first, _, second = text.partition("|")
            return Pair(self.operand(first.strip()), self.operand(second.strip()))
        if text == "_":
            return Sink()
        if text[0] == "!":
            return self.guard(text[1:].strip(), True)
        if _SPECIAL.match(text):
            return Special(text[1:])
        return self.register(text) or _literal(text) or self.symbol(text)

    def symbol(self, text: str) -> Sym:
        if not re.match(r"[\w$]+$", text):
            raise PlancError(f"{self.kernel.name}: the PTX operand {text!r} is not understood")
        return Sym(text)

    def memory(self, text: str) -> Mem:
        if "{" in text:  # [descriptor, {x, y}]
            base, _, coordinates = text.partition(",")
            items = coordinates.strip()[1:-1].split(",")
            return Mem(self.operand(base.strip()), 0, tuple(self.operand(t.strip()) for t in items))
        match = re.match(r"(.*?)\s*(?:([+-])\s*(-?(?:0x)?[0-9a-fA-F]+))?$", text)
        assert match is not None
        offset = int(match[3], 0) if match[3] else 0
        return Mem(self.operand(match[1]), -offset if match[2] == "-" else offset)

    def resolve(self) -> None:
        """Puts the index of the next instruction where a label was named."""
        for index, (name, scope) in self.jumps.items():
            target = scope.label(name)
            if target is None:
                raise PlancError(f"{self.kernel.name}: the PTX label {name} is not there")
            old = self.kernel.code[index]
            self.kernel.code[index] = Instruction(old.parts, old.guard, old.operands, target, old.text)


def _literal(text: str) -> Imm | None:
    if re.match(r"0[fF][0-9a-fA-F]{8}$", text):
        return Imm(int(text[2:], 16), True)
    if re.match(r"0[dD][0-9a-fA-F]{16}$", text):
        return Imm(int(text[2:], 16), True)
    if match := _NUMBER.match(text):
        return Imm(int(match[1] + match[2], 0) & (2**64 - 1))
    if re.match(r"-?\d+\.\d+$", text):
        return Imm(struct.unpack("<I", struct.pack("<f", float(text)))[0], True)
    return None
