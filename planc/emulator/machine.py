"""Runs a compiled kernel: in go a grid, parameters and device memory, out comes that memory as the kernel leaves it.

Some blocks of the grid run in step, every register an array over all their lanes. Where whole blocks part, each side
goes on alone; where lanes of one block part, those at the first piece of code go first, under a mask (see flow).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planc.emulator.compile import Program
from planc.emulator.memory import CARRIERS, Fault, Memory, Spans
from planc.emulator.tensor import Tensor
from planc.emulator.tensor_memory import TensorMemory
from planc.emulator.tiles import Barriers, Copies, Tiles
from planc.emulator.warp import WarpOps
from planc.errors import PlancError

Array = NDArray[Any]
_MAX_LANES = 1 << 14  # lanes that run in step: more do not fit into the host's caches
_MAX_SHARED = 1 << 26  # bytes of shared memory of all blocks in step
_MAX_STEPS = 20_000_000  # blocks of code; a kernel that runs more does not end


class KernelFault(PlancError):
    """A kernel did what a GPU would refuse, or what nobody may do: names the kernel, its thread and instruction."""


@dataclass(frozen=True)
class Grid:
    """Blocks in x, y and z, threads a block, and dynamic shared bytes."""

    blocks: tuple[int, int, int]
    threads: int
    shared: int


def run(
    program: Program,
    grid: Grid,
    params: bytes,
    memory: Memory,
    spans: Spans | None = None,
    blocks: Array | None = None,
) -> None:
    """Runs all thread blocks, or those of these numbers (x fastest). KernelFault on a wrong access, or when it waits.

    `spans` is what the kernel may touch, by default all that is allocated.
    """
    for _ in running(program, grid, params, memory, spans, blocks):
        raise KernelFault(f"kernel {program.kernel.name} waits for what nobody writes")


def running(
    program: Program,
    grid: Grid,
    params: bytes,
    memory: Memory,
    spans: Spans | None = None,
    blocks: Array | None = None,
) -> Iterator[None]:
    """As run, but stops each time that some of its threads sleep, to go on when another GPU has done something."""
    kernel = program.kernel
    if grid.threads % 32 or (kernel.threads and grid.threads != kernel.threads):
        raise KernelFault(f"kernel {kernel.name} runs with {grid.threads} threads a block, expected {kernel.threads}")
    if len(params) != kernel.param_bytes:
        raise KernelFault(f"kernel {kernel.name} gets {len(params)} bytes of parameters, expected {kernel.param_bytes}")
    chosen = np.arange(math.prod(grid.blocks)) if blocks is None else blocks
    shared = kernel.static_shared + grid.shared
    step = max(1, min(_MAX_LANES // grid.threads, _MAX_SHARED // max(shared, 1)))
    for start in range(0, len(chosen), step):
        yield from Machine(program, grid, params, memory, spans or memory.spans, chosen[start : start + step]).run()


class Machine(WarpOps):
    """Blocks that run in step."""

    def __init__(
        self, program: Program, grid: Grid, params: bytes, memory: Memory, spans: Spans, blocks: Array
    ) -> None:
        super().__init__(grid.threads, len(blocks) * grid.threads)
        self.program, self.grid, self.params, self.memory, self.spans = program, grid, params, memory, spans
        self.blocks = blocks
        self.registers: list[Array] = [np.zeros(1, bool if w == 0 else f"uint{8 * w}") for w in program.kernel.widths]
        self.shared_bytes = program.kernel.static_shared + grid.shared
        self._stride = -(-max(self.shared_bytes, 16) // 16) * 16
        self._place_shared(np.full(len(blocks) * self._stride, 0xCB, np.uint8))
        self.special = self._specials()
        self.at_block = 0
        self.where: Array | None = None  # the block of each lane, when they differ
        self.slept = False
        self.tensor, self.copies = Tensor(self), Copies(self)
        self.barriers, self.tiles = Barriers(self), Tiles(self)
        self.tensor_memory = TensorMemory(self)

    def _place_shared(self, data: Array) -> None:
        self.shared = {size: data.view(kind) for size, kind in CARRIERS.items()}
        self.shared_base = np.repeat(np.arange(len(self.blocks), dtype=np.int64) * self._stride, self.threads)

    def _specials(self) -> dict[str, Array]:
        (gx, gy, gz), threads, count = self.grid.blocks, self.threads, len(self.blocks)
        thread = np.tile(np.arange(threads, dtype=np.uint32), count)
        position = self.blocks % gx, self.blocks // gx % gy, self.blocks // (gx * gy)
        found = {"tid.x": thread, "laneid": thread & np.uint32(31), "warpid": thread >> np.uint32(5)}
        for axis, values, size, width in zip("xyz", position, (gx, gy, gz), (threads, 1, 1), strict=True):
            found[f"ctaid.{axis}"] = np.repeat(values, threads).astype(np.uint32) if count > 1 else _one(values[0])
            found[f"nctaid.{axis}"] = _one(size)
            found[f"ntid.{axis}"] = _one(width)
        return found | {"tid.y": _one(0), "tid.z": _one(0), "nwarpid": _one(threads // 32)}

    # --- control flow

    def run(self) -> Iterator[None]:
        """Runs these blocks to their end, with a stop whenever nothing is left to do but what sleeps."""
        waiting: list[Machine] = [self]
        steps = asleep = 0
        while waiting:
            machine = waiting.pop()
            while not machine.ended:
                steps += 1
                if steps > _MAX_STEPS:
                    raise KernelFault(f"kernel {self.program.kernel.name} does not end")
                with np.errstate(all="ignore"):
                    parts = machine.step()
                if machine.slept:
                    machine.slept = False
                    waiting[:0] = parts or [machine]
                    asleep += 1
                    if asleep >= 2 * len(waiting):  # what it waits for may be looked at before or behind a sleep
                        yield
                        asleep = 0
                    break
                if parts:
                    waiting.extend(parts)
                    break
            else:
                machine.end(None)

    def sleep(self, mask: Array | None) -> None:
        """nanosleep"""
        at = self.active(mask)
        self.slept = self.slept or at is None or at.size > 0

    @property
    def ended(self) -> bool:
        """Whether all lanes are at the end."""
        return self.where is None and self.at_block >= len(self.program.flow.blocks)

    def step(self) -> list[Machine]:
        """Runs one block of code; the machines that go on when whole thread blocks part, else none."""
        if self.where is not None:
            self._masked_step(self.where)
            return []
        block = self.program.flow.blocks[self.at_block]
        jumps = self._call(self.at_block, None)
        if block.target is None or (jumps is not None and not jumps.any()):
            self.at_block = block.after
        elif jumps is None or jumps.all():
            self.at_block = block.target
        else:
            return self._part(jumps, block.target, block.after)
        return []

    def _part(self, jumps: Array, target: int, after: int) -> list[Machine]:
        by_block = jumps.reshape(-1, self.threads)
        every = by_block.all(1)
        if not (every == by_block.any(1)).all():
            self.where = np.where(jumps, target, after)
            return []
        parts = []
        for chosen, at in ((every, target), (~every, after)):
            if at < len(self.program.flow.blocks):
                parts.append(self._taken(np.flatnonzero(chosen), at))
            else:
                self.end(np.flatnonzero(chosen))
        self.where, self.at_block = None, len(self.program.flow.blocks)
        return parts

    def _taken(self, chosen: Array, at: int) -> Machine:
        """A machine of some of these thread blocks."""
        self.copies.flush()
        other = Machine(self.program, self.grid, self.params, self.memory, self.spans, self.blocks[chosen])
        lanes = (chosen[:, None] * self.threads + np.arange(self.threads)).reshape(-1)
        across = self.program.flow.across
        for slot, value in enumerate(self.registers):
            if across >> slot & 1:
                other.registers[slot] = value[lanes] if value.size > 1 else value
        other._place_shared(self.shared[1].reshape(-1, self._stride)[chosen].reshape(-1))
        self.tensor_memory.taken(other.tensor_memory, chosen)
        other.at_block = at
        return other

    def end(self, blocks: Array | None) -> None:
        """Checks that blocks which end have nothing left."""
        if columns := self.tensor_memory.left(blocks):
            raise KernelFault(
                f"kernel {self.program.kernel.name} ends with {columns} columns of tensor memory (tcgen05.dealloc)"
            )

    def _masked_step(self, where: Array) -> None:
        lowest = int(where.min())
        mask = where == lowest
        if mask.all():
            self.where, self.at_block = None, lowest
            return
        block = self.program.flow.blocks[lowest]
        jumps = self._call(lowest, mask)
        if block.target is None:
            where[mask] = block.after
        elif jumps is None:
            where[mask] = block.target
        else:
            np.copyto(where, np.where(jumps, block.target, block.after), where=mask)

    def _call(self, number: int, mask: Array | None) -> Array | None:
        function = self.program.function(number, mask is not None)
        try:
            jumps: Array | None = function.run(self, self.registers, mask)
            return jumps
        except Fault as e:
            trace = e.__traceback__
            lines = []
            while trace is not None:
                if trace.tb_frame.f_code.co_name == "run" and trace.tb_frame.f_code.co_filename.startswith("<"):
                    lines.append(trace.tb_lineno)
                trace = trace.tb_next
            index = function.origin[lines[0] - 2] if lines else self.program.flow.blocks[number].start
            raise self._fault(e, self.program.kernel.code[index].text) from None

    def _fault(self, fault: Fault, text: str) -> KernelFault:
        lane = fault.lane or 0
        block = int(self.blocks[lane // self.threads])
        gx, gy, _ = self.grid.blocks
        place = f"thread {lane % self.threads} of block ({block % gx}, {block // gx % gy}, {block // (gx * gy)})"
        return KernelFault(f"kernel {self.program.kernel.name}: {fault}; {place}, at {text!r}")

    def block_barrier(self, mask: Array | None, count: int | None) -> None:
        """bar.sync: every thread of a block that comes here must come together with all the others."""
        if mask is None:
            return
        came = self.full(mask).reshape(-1, self.threads).sum(1)
        wrong = (came != 0) & (came != (count or self.threads))
        if wrong.any():
            block = int(np.flatnonzero(wrong)[0])
            expected = count or self.threads
            raise Fault(f"only {int(came[block])} of {expected} threads reach a barrier", block * self.threads)

    # --- lanes

    def active(self, mask: Array | None) -> Array | None:
        """Positions of the lanes of a mask; None for all of them."""
        if mask is None:
            return None
        if mask.size == 1:
            return None if mask[0] else np.zeros(0, np.int64)
        at = np.flatnonzero(mask)
        return None if at.size == self.lanes else at

    def each(self, mask: Array | None) -> Iterator[int]:
        """The lanes of a mask, one by one."""
        at = self.active(mask)
        yield from (range(self.lanes) if at is None else (int(lane) for lane in at))

    def pick(self, values: Array, at: Array | None) -> Array:
        """Values of some lanes."""
        return values if at is None or values.size == 1 else values[at]

    def at(self, values: Array, lane: int) -> Any:
        """The value of one lane."""
        return values[0] if values.size == 1 else values[lane]

    # --- memory

    def param(self, offset: int, kind: Any) -> Array:
        """A parameter."""
        return np.frombuffer(self.params, kind, 1, offset)

    def fetch(self, address: Array, size: int, what: str, at: Array | None) -> Array:
        """Checked elements of global memory; `at` says which lanes the addresses are of."""
        self._check(address, size, what, at)
        return self.memory.take(address, size)

    def put(self, address: Array, values: Array, size: int, what: str, at: Array | None) -> None:
        """Writes elements of global memory, checked."""
        self._check(address, size, what, at)
        self.memory.store(address, values, size)

    def _check(self, address: Array, size: int, what: str, at: Array | None) -> None:
        try:
            self.spans.check(address, size, what)
        except Fault as e:
            if at is not None and e.lane is not None:
                e.lane = int(at[min(e.lane, len(at) - 1)])
            raise

    def load_global(self, base: Array, offset: int, mask: Array | None, kind: Any, count: int) -> Sequence[Array]:
        """`count` values a lane, side by side in memory."""
        address = base + np.uint64(offset & (2**64 - 1)) if offset else base
        at = self.active(mask)
        if at is not None and at.size and address.size == 1:
            at = None
        if at is not None and not at.size:
            return [np.zeros(1, kind)] * count
        size = kind.itemsize * count
        if size > 16:
            halves = [
                self.load_global(base, offset + n * 16, mask, kind, 16 // kind.itemsize) for n in range(size // 16)
            ]
            return [value for half in halves for value in half]
        if at is None:
            return _apart(self.fetch(address, size, "a load", None), kind, count)
        values = np.zeros(self.lanes, CARRIERS[size])
        values[at] = self.fetch(address[at], size, "a load", at)
        return _apart(values, kind, count)

    def store_global(self, base: Array, offset: int, mask: Array | None, values: Sequence[Array]) -> None:
        """Writes values side by side."""
        address = base + np.uint64(offset & (2**64 - 1)) if offset else base
        at = self.active(mask)
        if at is not None and not at.size:
            return
        if at is not None or any(v.size > 1 for v in values):
            address = self.full(address)
        joined = _together(values)
        if at is not None:
            address = address[at]
        self.put(address, self.pick(joined, at), joined.itemsize, "a store", at)

    def shared_index(self, base: Array, offset: int, at: Array | None, size: int) -> Array:
        """Where an access of some lanes lies in the shared memory of all blocks, in elements of its size."""
        address = self.pick(base, at).astype(np.int64) + offset
        low, high = int(address.min(initial=0)), int(address.max(initial=0))
        if low < 0 or high + size > self.shared_bytes:
            lane = int(np.flatnonzero((address < 0) | (address + size > self.shared_bytes))[0])
            lane = lane if at is None else int(at[lane])
            at_byte = high if low >= 0 else low
            raise Fault(f"{size} bytes at byte {at_byte} of shared memory, which has {self.shared_bytes}", lane)
        if size > 1 and int(np.bitwise_or.reduce(address)) & (size - 1):
            raise Fault(f"{size} bytes at a byte of shared memory that is no multiple of {size}", 0)
        lanes = self.shared_base if at is None else self.shared_base[at]
        index: Array = (address + lanes) >> (size.bit_length() - 1)
        return index

    def load_shared(self, base: Array, offset: int, mask: Array | None, kind: Any, count: int) -> Sequence[Array]:
        """As load_global."""
        size, at = kind.itemsize * count, self.active(mask)
        if at is None:
            return _apart(self.shared[size][self.shared_index(base, offset, None, size)], kind, count)
        values = np.zeros(self.lanes, CARRIERS[size])
        if at.size:
            values[at] = self.shared[size][self.shared_index(base, offset, at, size)]
        return _apart(values, kind, count)

    def store_shared(self, base: Array, offset: int, mask: Array | None, values: Sequence[Array]) -> None:
        """As store_global."""
        at = self.active(mask)
        if at is not None and not at.size:
            return
        joined = _together(values)
        index = self.shared_index(base, offset, at, joined.itemsize)
        self.shared[joined.itemsize][index] = self.pick(joined, at)

    def atomic(
        self, space: str, base: Array, offset: int, mask: Array | None, operation: str, values: Sequence[Array]
    ) -> Array:
        """An atomic operation, lane after lane; the old values."""
        kind = values[0].dtype
        at = self.active(mask)
        lanes = np.arange(self.lanes) if at is None else at
        operands = [self.full(v)[lanes] for v in values]
        if space == "global":
            address = self.full(base + np.uint64(offset))[lanes]
            self._check(address, kind.itemsize, "an atomic operation", lanes)
            places: Sequence[int] = [int(a) for a in address]
            old = [self._atom_global(p, operation, *(o[n] for o in operands)) for n, p in enumerate(places)]
        else:
            view = self.shared[kind.itemsize].view(kind)
            old = []
            for n, place in enumerate(self.shared_index(self.full(base), offset, lanes, kind.itemsize)):
                old.append(view[place])
                view[place] = _combined(operation, view[place], *(o[n] for o in operands))
        result = np.zeros(self.lanes, kind)
        result[lanes] = old
        return result

    def _atom_global(self, address: int, operation: str, *operands: Any) -> Any:
        kind = operands[0].dtype
        where = np.array([address], np.uint64)
        old = self.memory.take(where, kind.itemsize).view(kind)
        new = np.array([_combined(operation, old[0], *operands)], kind)
        self.memory.store(where, new.view(CARRIERS[kind.itemsize]), kind.itemsize)
        return old[0]


def _one(value: int) -> Array:
    return np.array([value], np.uint32)


def _combined(operation: str, old: Any, value: Any, other: Any = None) -> Any:
    if operation == "cas":
        return other if old == value else old
    if operation == "exch":
        return value
    functions: dict[str, Any] = {"add": np.add, "min": np.minimum, "max": np.maximum}
    functions |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    return functions[operation](old, value)


def _apart(values: Array, kind: Any, count: int) -> Sequence[Array]:
    if count == 1:
        return (values.view(kind),)
    columns: Sequence[Array] = list(np.ascontiguousarray(values.view(kind).reshape(-1, count).T))
    return columns


def _together(values: Sequence[Array]) -> Array:
    if len(values) == 1:
        return values[0]
    lanes = max(v.size for v in values)
    rows = np.empty((lanes, len(values)), values[0].dtype)
    for number, value in enumerate(values):
        rows[:, number] = value
    joined: Array = rows.view(CARRIERS[rows.itemsize * len(values)]).reshape(-1)
    return joined
