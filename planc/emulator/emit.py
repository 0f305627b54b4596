"""The text of one block's function: in go operands and expressions, out come lines of Python."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from planc.emulator.ptx import Imm, Instruction, Kernel, Operand, Reg, Sink, Special, Sym

# PTX's type -> how its bits are held; bf16 has no numpy type and stays a bit pattern.
KIND = {
    "pred": "bool",
    "b8": "u8",
    "u8": "u8",
    "s8": "i8",
    "b16": "u16",
    "u16": "u16",
    "s16": "i16",
    "f16": "f16",
    "bf16": "u16",
    "b32": "u32",
    "u32": "u32",
    "s32": "i32",
    "f32": "f32",
    "f16x2": "u32",
    "bf16x2": "u32",
    "b64": "u64",
    "u64": "u64",
    "s64": "i64",
    "f64": "f64",
    "f32x2": "u64",
}
BYTES = {"bool": 0, "u8": 1, "i8": 1, "u16": 2, "i16": 2, "f16": 2, "u32": 4, "i32": 4, "f32": 4}
BYTES |= {"u64": 8, "i64": 8, "f64": 8}
UNSIGNED = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}
_PARAM_SPACE = 1 << 60  # where cvta.param puts the parameter buffer


class Refused(Exception):
    """An instruction, or a form of it, that is not emulated; the text says which part."""


def is_float(ptx: str) -> bool:
    """Whether a PTX type is one of floats."""
    return ptx.startswith(("f", "bf"))


def numpy_type(kind: str) -> Any:
    """The numpy type of a kind."""
    return np.dtype("bool" if kind == "bool" else {"u": "uint", "i": "int", "f": "float"}[kind[0]] + kind[1:])


class Code:
    """The function of one block while it is written."""

    def __init__(self, kernel: Kernel, across: int, masked: bool) -> None:
        self.kernel, self.across, self.masked = kernel, across, masked
        self.lines: list[str] = []
        self.origin: list[int] = []
        self.constants: dict[str, NDArray[Any]] = {}
        self.guard: str | None = None  # the lanes that take part: mask and guard, None for all
        self._index = 0
        self._count = 0
        self._now: dict[int, tuple[str, str]] = {}  # slot -> name and kind of its value
        self._views: dict[tuple[str, str], str] = {}
        self._guards: dict[tuple[str, bool], str] = {}

    def begin(self, index: int, instruction: Instruction) -> None:
        """Starts an instruction."""
        self._index = index
        self.guard = "mask" if self.masked else None
        if instruction.guard is not None:
            self.guard = self._guard(instruction.guard)

    def _guard(self, guard: Reg) -> str:
        name = self.read(Reg(guard.slot, 0), "bool")
        key = (name, guard.negated)
        if key not in self._guards:
            text = f"~{name}" if guard.negated else name
            self._guards[key] = self.let(f"{text} & mask" if self.masked else text)
        return self._guards[key]

    def branch(self, instruction: Instruction) -> str:
        """The expression that says which lanes jump; None when all do."""
        if instruction.guard is None:
            return "None"
        name = self.read(Reg(instruction.guard.slot, 0), "bool")
        return self.let(f"~{name}") if instruction.guard.negated else name

    def line(self, text: str) -> None:
        """Adds a statement."""
        self.lines.append(text)
        self.origin.append(self._index)

    def let(self, expression: str) -> str:
        """The name of an expression's value."""
        self._count += 1
        name = f"v{self._count}"
        self.line(f"{name} = {expression}")
        return name

    def constant(self, bits: int, kind: str) -> str:
        """The name of a constant array of one element."""
        width = BYTES[kind]
        if kind == "bool":
            name, value = f"c{int(bool(bits))}_bool", np.array([bool(bits)])
        else:
            low = bits & ((1 << 8 * width) - 1)
            name = f"c{low:x}_{kind}"
            value = np.array([low], numpy_type(UNSIGNED[width])).view(numpy_type(kind))
        self.constants[name] = value
        return name

    def read(self, operand: Operand, kind: str) -> str:
        """The name of an operand's value, of this kind; a wider register is cut, a narrower one filled with zeros."""
        if isinstance(operand, Reg):
            return self._register(operand, kind)
        if isinstance(operand, Imm):
            return self.constant(operand.bits, kind)
        if isinstance(operand, Special):
            value = self.let(f"special(m, {operand.name!r})")
            return value if kind == "u32" else self.let(f"{value}.astype({kind})")
        if isinstance(operand, Sym):
            return self.constant(self._address(operand.name), kind)
        raise Refused(f"the operand {operand}")

    def _register(self, reg: Reg, kind: str) -> str:
        if reg.slot not in self._now:
            self._now[reg.slot] = (self.let(f"r[{reg.slot}]"), "?")
        name, has = self._now[reg.slot]
        if (reg.width == 0) != (kind == "bool"):
            raise Refused("a predicate among numbers")
        if has != kind and kind != "bool":
            name = self._view(name, has, reg.width, kind)
        return self.let(f"~{name}") if reg.negated else name

    def _view(self, name: str, has: str, width: int, kind: str) -> str:
        key = (name, kind)
        if key not in self._views:
            if width == BYTES[kind]:
                self._views[key] = self.let(f"{name}.view({kind})")
            else:
                plain = self._view(name, has, width, UNSIGNED[width])
                self._views[key] = self.let(f"{plain}.astype({UNSIGNED[BYTES[kind]]}).view({kind})")
        return self._views[key]

    def _address(self, name: str) -> int:
        if name in self.kernel.shared:
            return self.kernel.shared[name]
        offset = next((p.offset for p in self.kernel.params if p.name == name), None)
        if offset is None:
            raise Refused(f"the symbol {name}")
        return offset

    def write(self, operand: Operand, expression: str, kind: str) -> None:
        """Gives a register a value; lanes that take no part keep the old one."""
        if isinstance(operand, Sink):
            return
        if not isinstance(operand, Reg):
            raise Refused(f"the result {operand}")
        if operand.width not in (BYTES[kind], 0):
            expression, kind = self._extended(expression, kind, operand.width)
        lives = self.across >> operand.slot & 1
        if self.guard is not None and (self.guard != "mask" or lives):
            expression = f"where({self.guard}, {expression}, {self._register(operand, kind)})"
        self._now[operand.slot] = (self.let(expression), kind)

    def _extended(self, expression: str, kind: str, width: int) -> tuple[str, str]:
        wide = kind[0] + str(8 * width) if kind[0] in "ui" else UNSIGNED[width]
        if kind[0] == "f":
            raise Refused(f"a result of {kind} in a register of {8 * width} bits")
        return f"({expression}).astype({wide})", wide

    def finish(self, written: int) -> None:
        """Hands the values that others read to the machine."""
        for slot, (name, _) in self._now.items():
            if written >> slot & 1:
                self.line(f"r[{slot}] = {name}")

    def float(self, operand: Operand, ptx: str) -> str:
        """An operand as floats to compute with: f32 for all narrow types, [lanes, 2] for packed ones."""
        kind = KIND[ptx]
        name = self.read(operand, kind)
        if ptx in ("f32", "f64"):
            return name
        if ptx.endswith("x2"):
            return self.let(f"floats.unpack({name}, {ptx[:-2]!r})")
        return self.let(f"floats.widen({name}, {ptx!r})")

    def write_float(self, operand: Operand, expression: str, ptx: str) -> None:
        """Rounds what `float` gave to its type again and writes it."""
        if ptx.endswith("x2"):
            self.write(operand, f"floats.pack({expression}, {ptx[:-2]!r})", KIND[ptx])
        elif ptx in ("f32", "f64"):
            self.write(operand, expression, ptx)
        elif ptx == "f16":
            self.write(operand, f"floats.narrow({expression}, 'f16')", "u16")
        else:
            self.write(operand, f"floats.narrow({expression}, {ptx!r})", KIND[ptx])


def special(machine: Any, name: str) -> NDArray[Any]:
    """A read-only register of all lanes."""
    value: NDArray[Any] = machine.special[name]
    return value


def allow(instruction: Instruction, *known: str) -> None:
    """Refuses an instruction that has a part (types aside) which is not named here."""
    for part in instruction.parts[1:]:
        if part not in known and part not in KIND:
            raise Refused(f".{part}")


def address_of_params() -> int:
    """Where generic addresses of the parameter buffer start."""
    return _PARAM_SPACE
