"""What lanes of a warp or block do together: in goes an instruction, out come calls of the machine that do it."""

from __future__ import annotations

from collections.abc import Callable

from planc.emulator.emit import KIND, Code, Refused, allow
from planc.emulator.ptx import Imm, Instruction, Pair


def _shfl(code: Code, ins: Instruction) -> None:
    allow(ins, "sync", "bfly", "idx", "up", "down")
    out = ins.operands[0]
    mode = ins.parts[2]
    value = code.read(ins.operands[1], "u32")
    by, clamp = ins.operands[2:4]
    if isinstance(by, Imm) and isinstance(clamp, Imm):
        result = code.let(f"m.shuffle({value}, {mode!r}, {by.bits & 31}, {clamp.bits & 0x1F1F})")
    else:
        result = code.let(f"m.shuffle_by({value}, {mode!r}, {code.read(by, 'u32')}, {code.read(clamp, 'u32')})")
    if isinstance(out, Pair):
        code.write(out.first, f"{result}[0]", "u32")
        code.write(out.second, f"{result}[1]", "bool")
    else:
        code.write(out, f"{result}[0]", "u32")


def _redux(code: Code, ins: Instruction) -> None:
    allow(ins, "sync", "add", "min", "max", "and", "or", "xor", "abs", "NaN")
    kind, operation = KIND[ins.type], ins.parts[2]
    value = code.read(ins.operands[1], kind)
    if "abs" in ins.parts:
        value = f"np.abs({value})"
    if kind == "f32" and "NaN" not in ins.parts:
        operation = f"f{operation}"
    code.write(ins.operands[0], f"m.reduce({value}, {operation!r}, {code.guard})", kind)


def _vote(code: Code, ins: Instruction) -> None:
    allow(ins, "sync", "all", "any", "uni", "ballot")
    value, mode = code.read(ins.operands[1], "bool"), ins.parts[2]
    result = f"m.vote({value}, {mode!r}, {code.guard})"
    code.write(ins.operands[0], result, "u32" if mode == "ballot" else "bool")


def _activemask(code: Code, ins: Instruction) -> None:
    code.write(ins.operands[0], f"m.vote({code.constant(1, 'bool')}, 'ballot', {code.guard})", "u32")


def _elect(code: Code, ins: Instruction) -> None:
    """One lane of each warp, the first that takes part."""
    out = ins.operands[0]
    assert isinstance(out, Pair)
    result = code.let(f"m.elect({code.guard})")
    code.write(out.first, f"{result}[0]", "u32")
    code.write(out.second, f"{result}[1]", "bool")


def _bar(code: Code, ins: Instruction) -> None:
    if "warp" in ins.parts:
        return
    if "red" in ins.parts or "arrive" in ins.parts or "cluster" in ins.parts:
        raise Refused("this barrier")
    count = ins.operands[1] if len(ins.operands) > 1 else None
    if count is not None and not isinstance(count, Imm):
        raise Refused("a count of threads in a register")
    code.line(f"m.block_barrier({code.guard}, {count.bits if count else None})")


RULES: dict[str, Callable[[Code, Instruction], None]] = {
    "shfl": _shfl, "redux": _redux, "vote": _vote, "activemask": _activemask, "elect": _elect, "bar": _bar,
    "barrier": _bar,
}  # fmt: skip
