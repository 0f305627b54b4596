"""Control flow of a kernel: in goes its code, out come basic blocks and which registers live across them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planc.emulator.ptx import Instruction, Kernel, Mem, Operand, Pair, Reg, Vec

# Instructions whose first operand is no result.
_NO_RESULT = {"st", "red", "bar", "barrier", "bra", "ret", "exit", "cp", "membar", "fence", "stmatrix", "tensormap"}
_NO_RESULT |= {"griddepcontrol", "setmaxnreg", "prefetch", "prefetchu", "discard", "applypriority", "nanosleep", "trap"}
_ENDS = ("bra", "ret", "exit", "trap")


@dataclass
class Block:
    """Instructions start..stop-1, run without a jump; then `target` when the last one jumps, else `after`.

    Both are indices of blocks, the number of blocks for the end of the kernel. `writes_out` are the slots, as bits,
    that are written here and read elsewhere.
    """

    start: int
    stop: int
    target: int | None
    after: int
    writes_out: int = 0


@dataclass
class Flow:
    """All blocks, those that lead to others first; `across` has a bit for each slot that lives across blocks."""

    blocks: list[Block]
    across: int


def flow(kernel: Kernel) -> Flow:
    """The blocks of a kernel."""
    code = kernel.code
    starts = {0} | {i.target for i in code if i.target is not None}
    starts |= {n + 1 for n, i in enumerate(code) if i.name in _ENDS}
    order = sorted(s for s in starts if s < len(code))
    index = {start: n for n, start in enumerate(order)}
    end = len(order)
    blocks, leads = [], []
    for n, start in enumerate(order):
        stop = order[n + 1] if n + 1 < end else len(code)
        last = code[stop - 1]
        target = index.get(last.target, end) if last.target is not None else None
        if last.name in ("ret", "exit", "trap"):
            target = end
        blocks.append(Block(start, stop, target, n + 1 if stop < len(code) else end))
        always = target is not None and last.guard is None
        leads.append([to for to in (target, None if always else blocks[-1].after) if to is not None and to != end])
    blocks = _moved(blocks, _order(leads))
    return Flow(blocks, _liveness(kernel, blocks))


def _moved(blocks: list[Block], order: list[int]) -> list[Block]:
    """The blocks in another order, their jumps by it."""
    place = {old: new for new, old in enumerate(order)} | {len(blocks): len(blocks)}
    moved = [blocks[old] for old in order]
    for block in moved:
        block.target, block.after = None if block.target is None else place[block.target], place[block.after]
    return moved


def _order(leads: list[list[int]]) -> list[int]:
    """Blocks behind those that lead to them and ahead of what follows their loop: where the first go first, lanes that
    parted meet again as soon as they can.
    """
    loops = _loops(leads)

    def inner_last(block: int) -> Iterator[int]:
        """Where a block leads to, out of loops first: what is met first comes last."""
        shared = {to: sum(block in loop and to in loop for loop in loops) for to in leads[block]}
        return iter(sorted(shared, key=lambda to: (shared[to], -to)))

    seen, ended = {0}, []
    path = [(0, inner_last(0))]
    while path:
        to = next((n for n in path[-1][1] if n not in seen), None)
        if to is None:
            ended.append(path.pop()[0])
        else:
            seen.add(to)
            path.append((to, inner_last(to)))
    return ended[::-1] + [n for n in range(len(leads)) if n not in seen]


def _loops(leads: list[list[int]]) -> list[set[int]]:
    """The blocks of each loop."""
    before: list[list[int]] = [[] for _ in leads]
    for block, next_ones in enumerate(leads):
        for n in next_ones:
            before[n].append(block)
    found: dict[int, set[int]] = {}
    seen, on_path = {0}, {0}
    path = [(0, iter(leads[0]))]
    while path:
        block, rest = path[-1]
        to = next(rest, None)
        if to is None:
            on_path.discard(path.pop()[0])
        elif to in on_path:
            loop, left = found.setdefault(to, {to}), [block]
            while left:
                if (n := left.pop()) not in loop:
                    loop.add(n)
                    left += before[n]
        elif to not in seen:
            seen.add(to)
            on_path.add(to)
            path.append((to, iter(leads[to])))
    return list(found.values())


def _liveness(kernel: Kernel, blocks: list[Block]) -> int:
    uses, defs = [0] * len(blocks), [0] * len(blocks)
    for n, block in enumerate(blocks):
        for instruction in kernel.code[block.start : block.stop]:
            read, written = _slots(instruction)
            uses[n] |= read & ~defs[n]
            defs[n] |= written
    live = [0] * (len(blocks) + 1)
    changed = True
    while changed:
        changed = False
        for n in reversed(range(len(blocks))):
            out = live[blocks[n].after] | (live[blocks[n].target] if blocks[n].target is not None else 0)  # type: ignore[index]
            new = uses[n] | (out & ~defs[n])
            blocks[n].writes_out = defs[n] & out
            changed = changed or new != live[n]
            live[n] = new
    across = 0
    for slots in live:
        across |= slots
    return across


def _slots(instruction: Instruction) -> tuple[int, int]:
    """Slots that are read and written, as bits. A guarded result also reads the old value."""
    read = written = 0
    operands = instruction.operands
    if instruction.name not in _NO_RESULT and operands and not _is_store(instruction):
        written = _bits(operands[0])
        if instruction.guard is not None or instruction.name == "wgmma":
            read |= written
        operands = operands[1:]
    for operand in operands:
        read |= _bits(operand)
    if instruction.guard is not None:
        read |= 1 << instruction.guard.slot
    return read, written


def _is_store(instruction: Instruction) -> bool:
    action = instruction.parts[1] if len(instruction.parts) > 1 else ""
    if instruction.name == "tcgen05":
        return action != "ld"
    return instruction.name == "mbarrier" and action in ("init", "inval", "expect_tx")


def _bits(operand: Operand) -> int:
    if isinstance(operand, Reg):
        return 1 << operand.slot
    if isinstance(operand, Vec):
        return _all(operand.items)
    if isinstance(operand, Pair):
        return _bits(operand.first) | _bits(operand.second)
    if isinstance(operand, Mem):
        return _bits(operand.base) | _all(operand.coordinates)
    return 0


def _all(operands: tuple[Operand, ...]) -> int:
    bits = 0
    for operand in operands:
        bits |= _bits(operand)
    return bits
