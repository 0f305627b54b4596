"""Loads, stores, atomics and asynchronous copies: in goes an instruction, out come calls of the machine that do it."""

from __future__ import annotations

from collections.abc import Callable

from planc.emulator.emit import BYTES, KIND, UNSIGNED, Code, Refused, address_of_params, is_float
from planc.emulator.ptx import Imm, Instruction, Mem, Operand, Sym, Vec

_HINTS = frozenset(
    "volatile,relaxed,acquire,release,weak,cta,gpu,sys,nc,ca,cg,cs,lu,cv,wb,wt,async,aligned,sync".split(",")  # noqa: SIM905
)
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}


def space_of(ins: Instruction) -> str:
    """The memory that an instruction names: global, shared or param. Generic addresses are those of global memory."""
    for part in ins.parts[1:]:
        space, _, detail = part.partition("::")
        if space in ("global", "shared", "param"):
            if detail == "cluster":
                raise Refused("memory of another block of the cluster")
            return space
        if space in ("local", "const"):
            raise Refused(f"{space} memory")
    return "global"


def _check(ins: Instruction, *known: str) -> None:
    for part in ins.parts[1:]:
        plain = part.partition("::")[0]
        if plain not in (*known, *_HINTS, *_VECTORS, "global", "shared", "param", "L1", "L2") and part not in KIND:
            raise Refused(f".{part}")


def place(code: Code, operand: Operand, space: str) -> str:
    """The arguments `base, offset` of a memory operand."""
    if not isinstance(operand, Mem):
        raise Refused(f"the address {operand}")
    return f"{code.read(operand.base, 'u64' if space == 'global' else 'u32')}, {operand.offset}"


def _items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vec) else (operand,)


def _ld(code: Code, ins: Instruction) -> None:
    _check(ins)
    space, kind = space_of(ins), KIND[ins.type]
    out, source = ins.operands[:2]
    items = _items(out)
    if space == "param":
        assert isinstance(source, Mem)
        if not isinstance(source.base, Sym):
            raise Refused("a parameter by a register")
        offset = int(code.constants[code.read(source.base, "u64")][0]) + source.offset
        for number, item in enumerate(items):
            code.write(item, f"m.param({offset + number * BYTES[kind]}, {kind})", kind)
        return
    where = place(code, source, space)
    values = code.let(f"m.load_{space}({where}, {code.guard}, {kind}, {len(items)})")
    for number, item in enumerate(items):
        code.write(item, f"{values}[{number}]", kind)


def _st(code: Code, ins: Instruction) -> None:
    _check(ins)
    space, kind = space_of(ins), UNSIGNED[BYTES[KIND[ins.type]]]
    if space == "param":
        raise Refused("a store to parameters")
    where = place(code, ins.operands[0], space)
    values = ", ".join(code.read(item, kind) for item in _items(ins.operands[1]))
    code.line(f"m.store_{space}({where}, {code.guard}, ({values},))")


def _atomic(code: Code, ins: Instruction) -> None:
    operation = next((p for p in ins.parts if p in ("add", "min", "max", "and", "or", "xor", "exch", "cas")), None)
    if operation is None or "noftz" in ins.parts:
        raise Refused("this atomic operation")
    _check(ins, operation)
    space, kind = space_of(ins), KIND[ins.type]
    if is_float(ins.type) and ins.type != "f32":
        raise Refused(f"atomics of {ins.type}")
    operands = ins.operands if ins.name == "red" else ins.operands[1:]
    where = place(code, operands[0], space)
    values = ", ".join(code.read(o, kind) for o in operands[1:])
    old = code.let(f"m.atomic({space!r}, {where}, {code.guard}, {operation!r}, ({values},))")
    if ins.name == "atom":
        code.write(ins.operands[0], old, kind)


def _cp(code: Code, ins: Instruction) -> None:
    parts = ins.parts
    if "bulk" in parts:
        return _bulk(code, ins)
    if "commit_group" in parts:
        return code.line("m.copies.commit()")
    if "wait_group" in parts:
        group = ins.operands[0]
        assert isinstance(group, Imm)
        return code.line(f"m.copies.wait({group.bits})")
    if "wait_all" in parts:
        return code.line("m.copies.commit(); m.copies.wait(0)")
    if "mbarrier" in parts:
        raise Refused("cp.async with a barrier")
    _check(ins)
    target, source = place(code, ins.operands[0], "shared"), place(code, ins.operands[1], "global")
    size = ins.operands[2]
    assert isinstance(size, Imm)
    filled = code.read(ins.operands[3], "u32") if len(ins.operands) > 3 and not _is_policy(ins) else "None"
    code.line(f"m.copies.add({target}, {source}, {code.guard}, {size.bits}, {filled})")


def _is_policy(ins: Instruction) -> bool:
    return any(p.endswith("cache_hint") for p in ins.parts) and len(ins.operands) == 4


def _bulk(code: Code, ins: Instruction) -> None:
    """TMA: one lane moves a whole tile."""
    parts = ins.parts
    if "commit_group" in parts or "wait_group" in parts:
        return  # stores of tiles are done at once
    if "tensor" not in parts:
        raise Refused("a bulk copy without a tensor")
    if any("multicast" in p or "im2col" in p or "cta_group" in p or p.startswith("reduce") for p in parts):
        raise Refused("this bulk copy")
    first, second = ins.operands[:2]
    load = isinstance(second, Mem) and bool(second.coordinates)
    tensor, tile = (second, first) if load else (first, second)
    assert isinstance(tensor, Mem)
    descriptor = code.read(tensor.base, "u64")
    coordinates = ", ".join(code.read(c, "i32") for c in tensor.coordinates)
    where = place(code, tile, "shared")
    if load:
        barrier = place(code, ins.operands[2], "shared")
        code.line(f"m.tiles.load({where}, {descriptor}, ({coordinates},), {barrier}, {code.guard})")
    else:
        code.line(f"m.tiles.store({where}, {descriptor}, ({coordinates},), {code.guard})")


def _mbarrier(code: Code, ins: Instruction) -> None:
    action = ins.parts[1]
    if any("cluster" in p and "::" in p for p in ins.parts) or "noComplete" in ins.parts:
        raise Refused("barriers of a cluster")
    if action in ("init", "inval"):
        count = code.read(ins.operands[1], "u32") if action == "init" else "None"
        code.line(f"m.barriers.{action}({place(code, ins.operands[0], 'shared')}, {code.guard}, {count})")
    elif action == "arrive":
        count = code.read(ins.operands[2], "u32") if len(ins.operands) > 2 else code.constant(1, "u32")
        sent, count = (count, code.constant(1, "u32")) if "expect_tx" in ins.parts else ("None", count)
        where = place(code, ins.operands[1], "shared")
        code.line(f"m.barriers.arrive({where}, {code.guard}, {count}, {sent})")
    elif action == "expect_tx":
        where, sent = place(code, ins.operands[0], "shared"), code.read(ins.operands[1], "u32")
        code.line(f"m.barriers.arrive({where}, {code.guard}, None, {sent})")
    elif action in ("try_wait", "test_wait") and "parity" in ins.parts:
        where, parity = place(code, ins.operands[1], "shared"), code.read(ins.operands[2], "u32")
        code.write(ins.operands[0], f"m.barriers.passed({where}, {code.guard}, {parity})", "bool")
    else:
        raise Refused(f".{action}")


def _tensormap(code: Code, ins: Instruction) -> None:
    """Builds a tensor's descriptor in shared memory, and copies it to global memory."""
    if ins.parts[1] == "cp_fenceproxy":
        target, source = place(code, ins.operands[0], "global"), place(code, ins.operands[1], "shared")
        return code.line(f"m.tiles.publish({target}, {source}, {code.guard})")
    if ins.parts[1:3] != ("replace", "tile"):
        raise Refused(f".{ins.parts[1]}")
    field, kind = ins.parts[3], KIND[ins.type]
    where = place(code, ins.operands[0], "shared")
    index, value = (ins.operands[1], ins.operands[2]) if len(ins.operands) > 2 else (Imm(0), ins.operands[1])
    assert isinstance(index, Imm)
    code.line(f"m.tiles.replace({where}, {field!r}, {index.bits}, {code.read(value, kind)}, {code.guard})")


def _cvta(code: Code, ins: Instruction) -> None:
    """Generic addresses are those of global memory; parameters get a place of their own."""
    value = code.read(ins.operands[1], "u64")
    if "param" in ins.parts:
        value = f"{value} + {code.constant(address_of_params(), 'u64')}"
    elif "global" not in ins.parts:
        raise Refused("generic addresses")
    code.write(ins.operands[0], value, "u64")


def _nothing(code: Code, ins: Instruction) -> None:
    """What only orders memory, or hints at caches: lanes go in step."""


def _sleep(code: Code, ins: Instruction) -> None:
    """A kernel sleeps while it waits for what another GPU writes."""
    code.line(f"m.sleep({code.guard})")


def _policy(code: Code, ins: Instruction) -> None:
    code.write(ins.operands[0], code.constant(0, "u64"), "u64")


RULES: dict[str, Callable[[Code, Instruction], None]] = {
    "ld": _ld, "st": _st, "atom": _atomic, "red": _atomic, "cp": _cp, "mbarrier": _mbarrier, "tensormap": _tensormap,
    "cvta": _cvta, "createpolicy": _policy, "membar": _nothing, "fence": _nothing, "prefetch": _nothing,
    "prefetchu": _nothing, "discard": _nothing, "applypriority": _nothing, "griddepcontrol": _nothing,
    "setmaxnreg": _nothing, "nanosleep": _sleep,
}  # fmt: skip
