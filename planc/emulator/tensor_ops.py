"""Matrix instructions: in goes an instruction, out come calls that multiply fragments and move them."""

from __future__ import annotations

import re
from collections.abc import Callable

from planc.emulator.emit import KIND, Code, Refused
from planc.emulator.memory_ops import place
from planc.emulator.ptx import Imm, Instruction, Operand, Vec

_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)$")
_ELEMENTS = ("bf16", "f16", "tf32", "e4m3", "e5m2", "s8", "u8")


def _shape(ins: Instruction) -> tuple[int, int, int]:
    match = next((m for m in map(_SHAPE.match, ins.parts) if m), None)
    if match is None:
        raise Refused("its shape")
    return int(match[1]), int(match[2]), int(match[3])


def _vector(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vec) else (operand,)


def _read_all(code: Code, operand: Operand, kind: str) -> str:
    return "(" + "".join(f"{code.read(item, kind)}, " for item in _vector(operand)) + ")"


def _mma(code: Code, ins: Instruction) -> None:
    m, n, k = _shape(ins)
    out, left, right = ins.parts[-4:-1]
    if ins.parts[1:3] != ("sync", "aligned") or "sp" in ins.parts or "block_scale" in ins.parts:
        raise Refused("sparse or scaled products")
    if left not in _ELEMENTS or right not in _ELEMENTS or out not in ("f32", "s32") or (m, n) != (16, 8):
        raise Refused(f"{out} from {left} and {right} in m{m}n{n}")
    kind = KIND[out]
    a, b = (_read_all(code, o, "u32") for o in ins.operands[1:3])
    c = _read_all(code, ins.operands[3], kind)
    result = code.let(f"m.tensor.mma({a}, {b}, {c}, {k}, {left!r}, {right!r}, {kind})")
    for number, item in enumerate(_vector(ins.operands[0])):
        code.write(item, f"{result}[{number}]", kind)


def _wgmma(code: Code, ins: Instruction) -> None:
    if ins.parts[1] in ("fence", "commit_group", "wait_group"):
        return  # the product is done when it is issued
    m, n, k = _shape(ins)
    out, left, right = ins.parts[-3:]
    if ins.parts[1] != "mma_async" or "sp" in ins.parts or out not in ("f32", "s32") or left not in _ELEMENTS:
        raise Refused(f"{out} from {left}")
    kind, registers = KIND[out], _vector(ins.operands[0])
    source, options = ins.operands[1], ins.operands[3:]
    a = _read_all(code, source, "u32") if isinstance(source, Vec) else code.read(source, "u64")
    b = code.read(ins.operands[2], "u64")
    keep = code.read(options[0], "bool")
    numbers = [_signed(o) for o in options[1:]]
    scale_a, scale_b, *transposed = numbers if numbers else [1, 1]
    major = _majors(transposed, isinstance(source, Vec))
    old = _read_all(code, ins.operands[0], kind)
    types, sign = f"{left!r}, {right!r}, {kind}", scale_a * scale_b
    result = code.let(f"m.tensor.wgmma({a}, {b}, {old}, {keep}, {(m, n, k)}, {types}, {sign}, {major})")
    for number, item in enumerate(registers):
        code.write(item, f"{result}[{number}]", kind)


def _majors(flags: list[int], a_in_registers: bool) -> tuple[bool, bool]:
    """Whether A and B lie with K as their slow axis."""
    if a_in_registers:
        return False, bool(flags[0]) if flags else False
    return (bool(flags[0]), bool(flags[1])) if flags else (False, False)


def _signed(operand: Operand) -> int:
    if not isinstance(operand, Imm):
        raise Refused("an option in a register")
    return operand.bits - (1 << 64) if operand.bits >> 63 else operand.bits


def _matrix_options(ins: Instruction) -> tuple[int, bool]:
    count = {"x1": 1, "x2": 2, "x4": 4}.get(next((p for p in ins.parts if p in ("x1", "x2", "x4")), "x1"))
    if "m8n8" not in ins.parts or ins.type != "b16":
        raise Refused("matrices of another shape than m8n8.b16")
    assert count is not None
    return count, "trans" in ins.parts


def _ldmatrix(code: Code, ins: Instruction) -> None:
    count, transposed = _matrix_options(ins)
    where = place(code, ins.operands[1], "shared")
    result = code.let(f"m.tensor.load_matrix({where}, {code.guard}, {count}, {transposed})")
    for number, item in enumerate(_vector(ins.operands[0])):
        code.write(item, f"{result}[{number}]", "u32")


def _stmatrix(code: Code, ins: Instruction) -> None:
    count, transposed = _matrix_options(ins)
    where = place(code, ins.operands[0], "shared")
    values = _read_all(code, ins.operands[1], "u32")
    code.line(f"m.tensor.store_matrix({where}, {code.guard}, {values}, {count}, {transposed})")


def _movmatrix(code: Code, ins: Instruction) -> None:
    code.write(ins.operands[0], f"m.tensor.transpose({code.read(ins.operands[1], 'u32')})", "u32")


RULES: dict[str, Callable[[Code, Instruction], None]] = {
    "mma": _mma, "wgmma": _wgmma, "ldmatrix": _ldmatrix, "stmatrix": _stmatrix, "movmatrix": _movmatrix,
}  # fmt: skip
