"""tcgen05: in goes an instruction, out come calls of tensor memory that do it."""

from __future__ import annotations

from collections.abc import Callable

from planc.emulator.emit import Code, Refused
from planc.emulator.memory_ops import place
from planc.emulator.ptx import Imm, Instruction, Mem, Vec

_SHAPES = ("32x32b", "16x32bx2", "16x256b")
_KINDS = ("f16", "tf32", "f8f6f4", "i8")
_PARTS = {
    "alloc": ("sync", "aligned", "shared::cta", "b32"),
    "dealloc": ("sync", "aligned", "b32"),
    "relinquish_alloc_permit": ("sync", "aligned"),
    "mma": tuple(f"kind::{kind}" for kind in _KINDS),
    "commit": ("mbarrier::arrive::one", "shared::cluster", "b64"),
    "wait::ld": ("sync", "aligned"),
    "wait::st": ("sync", "aligned"),
    "fence::before_thread_sync": (),
    "fence::after_thread_sync": (),
}


def _tcgen05(code: Code, ins: Instruction) -> None:
    action = ins.parts[1]
    if action in ("ld", "st"):
        return _move(code, ins, action == "ld")
    if action not in _PARTS:
        raise Refused(f".{action}")
    for part in ins.parts[2:]:
        if part not in (*_PARTS[action], "cta_group::1"):
            raise Refused(f".{part}")
    operands = ins.operands
    if action == "mma":
        _mma(code, ins)
    elif action == "alloc":
        count = code.read(operands[1], "u32")
        code.line(f"m.tensor_memory.alloc({place(code, operands[0], 'shared')}, {code.guard}, {count})")
    elif action == "dealloc":
        address, count = (code.read(o, "u32") for o in operands)
        code.line(f"m.tensor_memory.dealloc({address}, {code.guard}, {count})")
    elif action == "relinquish_alloc_permit":
        code.line(f"m.tensor_memory.relinquish({code.guard})")
    elif action == "commit":
        code.line(f"m.tensor_memory.commit({place(code, operands[0], 'shared')}, {code.guard})")
    elif action.startswith("wait"):
        code.line(f"m.tensor_memory.wait({code.guard}, {action == 'wait::st'})")


def _move(code: Code, ins: Instruction, load: bool) -> None:
    shape = next((p for p in ins.parts if p in _SHAPES), None)
    times = next((int(p[1:]) for p in ins.parts if p[0] == "x" and p[1:].isdigit()), 0)
    if shape is None or len(ins.parts) != 7 or ins.type != "b32" or not times:
        raise Refused("its shape")
    where, data = ins.operands[1 if load else 0], ins.operands[0 if load else -1]
    half = ins.operands[2 if load else 1] if len(ins.operands) > 2 else Imm(0)
    items = data.items if isinstance(data, Vec) else (data,)
    if not isinstance(half, Imm) or len(items) != times * (4 if shape == "16x256b" else 1):
        raise Refused("its registers")
    at = f"{place(code, where, 'shared')}, {code.guard}, {shape!r}"
    if load:
        values = code.let(f"m.tensor_memory.load({at}, {len(items)}, {half.bits})")
        for number, item in enumerate(items):
            code.write(item, f"{values}[{number}]", "u32")
    else:
        given = "".join(f"{code.read(item, 'u32')}, " for item in items)
        code.line(f"m.tensor_memory.store({at}, ({given}), {half.bits})")


def _mma(code: Code, ins: Instruction) -> None:
    if len(ins.operands) != 5 or any(isinstance(o, Vec) for o in ins.operands):
        raise Refused("masked or scaled lanes")
    d, a, b, descriptor, keep = ins.operands
    kind = next(p for p in ins.parts if p.startswith("kind::")).removeprefix("kind::")
    first = place(code, a, "shared") if isinstance(a, Mem) else f"{code.read(a, 'u64')}, None"
    rest = f"{code.read(b, 'u64')}, {code.read(descriptor, 'u32')}, {code.read(keep, 'bool')}"
    code.line(f"m.tensor_memory.mma({place(code, d, 'shared')}, {first}, {rest}, {code.guard}, {kind!r})")


RULES: dict[str, Callable[[Code, Instruction], None]] = {"tcgen05": _tcgen05}
