"""Tensor memory (sm_100): in go tcgen05 instructions, out come products in 128 lanes x 512 columns of 32 bits a block.

A product runs when the barrier of its commit is waited for, the latest moment that a GPU leaves it: operands that
change before show in the result, and who touches its columns before is told. A load has its values at once: compiled
code uses them before it waits for them, and the assembler makes each use wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from planc.emulator import floats
from planc.emulator.memory import Fault
from planc.emulator.tensor import check_tiles

if TYPE_CHECKING:
    from planc.emulator.machine import Machine

Array = Any  # NDArray[Any], whose arithmetic mypy types too loosely here
LANES, COLUMNS = 128, 512
_POISON = 0xCBCBCBCB
_LANE = np.arange(32)
_FORMATS = {  # kind -> elements by their code in an instruction descriptor
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": {0: "e4m3", 1: "e5m2"},
    "i8": {0: "u8", 1: "s8"},
}
_K_BYTES = 32  # of each operand in one product
# What was done to a column and not waited for, apart for each half of a quarter's lanes: 64 rows take one of them.
_WRITTEN, _STORED, _LOADED, _READ = 1, 2, 4, 8
_OPEN = {
    _WRITTEN: "is written by a product whose barrier was not waited for",
    _READ: "is read by a product whose barrier was not waited for",
    _STORED: "has a store that was not waited for (tcgen05.wait::st)",
    _LOADED: "has a load that was not waited for (tcgen05.wait::ld)",
}


@dataclass(frozen=True)
class Form:
    """What an instruction descriptor says: D [m, n] of `out`, elements of A and B, which of them have K slow."""

    m: int
    n: int
    k: int
    out: Any
    left: str
    right: str
    slow: tuple[bool, bool]
    sign: int


@lru_cache(maxsize=256)
def form(descriptor: int, kind: str) -> Form:
    """Decodes an instruction descriptor. Fault for what is not emulated, or what no GPU takes."""
    m, n = (descriptor >> 24 & 31) << 4, (descriptor >> 17 & 63) << 3
    if descriptor & 0xE080004F:
        raise Fault(f"the instruction descriptor 0x{descriptor:x} (sparse, saturating or shifted) is not emulated", 0)
    out = {1: np.dtype(np.float32), 2: np.dtype(np.int32)}.get(descriptor >> 4 & 3)
    left, right = (_FORMATS[kind].get(descriptor >> at & 7) for at in (7, 10))
    if left is None or right is None or out is None or (out.kind == "i") != (kind == "i8"):
        raise Fault(f"the elements of the instruction descriptor 0x{descriptor:x} are not emulated", 0)
    if m not in (64, 128) or not 8 <= n <= 256 or n % (8 if m == 64 else 16) or (kind == "i8" and n > 32 and n % 16):
        raise Fault(f"no product has {m} rows and {n} columns", 0)
    slow = bool(descriptor >> 15 & 1), bool(descriptor >> 16 & 1)
    sign = -1 if (descriptor >> 13 ^ descriptor >> 14) & 1 else 1
    return Form(m, n, _K_BYTES // floats.SIZE[left], out, left, right, slow, sign)


@lru_cache(maxsize=256)
def places(shape: str, registers: int, half: int) -> tuple[Array, Array]:
    """Lane and column, from those of the address on, of each [register, thread] of a load or store."""
    register, thread = np.arange(registers)[:, None], _LANE[None]
    if shape == "32x32b":
        return thread + 0 * register, register + 0 * thread
    if shape == "16x32bx2":
        second = thread >= 16
        return thread % 16 + second * (half >> 16) + 0 * register, register + second * (half & 0xFFFF)
    row, column = thread // 4 + 8 * (register >> 1 & 1), 8 * (register >> 2) + 2 * (thread % 4) + (register & 1)
    return row, column  # 16x256b


def rows_of(m: int) -> Array:
    """The lane of each row of D, and of A: 64 rows take half of the lanes of each quarter."""
    row = np.arange(m)
    return row if m == LANES else row // 16 * 32 + row % 16


@dataclass(frozen=True)
class _Product:
    """A product of some blocks that was issued; `a` is a column of tensor memory, or a descriptor."""

    blocks: Array
    form: Form
    lane: Array
    column: Array
    a: Array
    a_here: bool
    b: Array
    keep: Array

    def of(self, chosen: Array) -> _Product:
        parts = ("blocks", "lane", "column", "a", "b", "keep")
        return replace(self, **{name: getattr(self, name)[chosen] for name in parts})


@dataclass(frozen=True)
class _Commit:
    """An arrival at a barrier, by its byte in shared memory, once all before it is done."""

    blocks: Array
    barrier: Array

    def of(self, chosen: Array) -> _Commit:
        return _Commit(self.blocks[chosen], self.barrier[chosen])


class TensorMemory:
    """Tensor memory of a machine's blocks, and the products that are still to run."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._queue: list[_Product | _Commit] = []
        self._words: Array | None = None  # [block, column, lane]

    def _made(self) -> Array:
        if self._words is None:
            blocks = len(self.machine.blocks)
            self._words = np.empty((blocks, COLUMNS, LANES), np.uint32)
            self._size = np.zeros((blocks, COLUMNS), np.int32)  # of an allocation, where it begins
            self._taken = np.zeros((blocks, COLUMNS), bool)
            self._marks = np.zeros((blocks, 2, COLUMNS), np.uint8)
            self._closed = np.zeros(blocks, bool)
            self._issuer = np.full(blocks, -1, np.int64)  # the thread whose products are not committed
        return self._words

    def taken(self, other: TensorMemory, chosen: Array) -> None:
        """Hands the state of some blocks to the machine that goes on with them."""
        if self._words is None:
            return
        other._made()
        for name in ("_words", "_size", "_taken", "_marks", "_closed", "_issuer"):
            setattr(other, name, getattr(self, name)[chosen])
        for entry in self._queue:
            there = np.isin(entry.blocks, chosen)
            if there.any():
                part = entry.of(there)
                other._queue.append(replace(part, blocks=np.searchsorted(chosen, part.blocks)))

    def left(self, blocks: Array | None = None) -> int:
        """Columns that blocks, which are at their end, have not given back."""
        if self._words is None:
            return 0
        taken = self._taken if blocks is None else self._taken[blocks]
        return int(taken.sum(1).max(initial=0))

    # --- who takes part

    def _whole_warps(self, mask: Array | None) -> Array:
        """Numbers of the warps that take part."""
        m = self.machine
        if mask is None:
            return np.arange(m.lanes // 32)
        taking = m.full(mask).reshape(-1, 32)
        warps = np.flatnonzero(taking.any(1))
        if not taking[warps].all():
            raise Fault("only some threads of a warp take part", int(np.flatnonzero(m.full(mask))[0]))
        return warps

    def _of_warps(self, value: Array, warps: Array, what: str) -> Array:
        """A value that the threads of each warp must agree on."""
        if value.size == 1:
            return np.full(len(warps), int(value[0]), np.int64)
        each = self.machine.full(value).reshape(-1, 32)[warps]
        if (each != each[:, :1]).any():
            raise Fault(f"the threads of a warp differ in {what}", int(warps[0]) * 32)
        first: Array = each[:, 0].astype(np.int64)
        return first

    def _threads(self, mask: Array | None) -> tuple[Array, Array]:
        """The lanes that take part and their blocks: one thread of a block issues and commits."""
        m = self.machine
        at = m.active(mask)
        lanes = np.arange(m.lanes) if at is None else at
        blocks = lanes // m.threads
        if len(np.unique(blocks)) < len(blocks):
            raise Fault("several threads of a block issue what one of them must issue", int(lanes[0]))
        threads = lanes % m.threads
        other = (self._issuer[blocks] >= 0) & (self._issuer[blocks] != threads)
        if other.any():
            raise Fault("another thread's products are not committed yet", int(lanes[np.flatnonzero(other)[0]]))
        self._issuer[blocks] = threads
        return lanes, blocks

    # --- allocations

    def alloc(self, base: Array, offset: int, mask: Array | None, count: Array) -> None:
        """Writes the address of columns to shared memory, the last ones first."""
        m, words, warps = self.machine, self._made(), self._whole_warps(mask)
        for warp, size in zip(warps, self._of_warps(count, warps, "a number of columns"), strict=True):
            block, lane = int(warp) * 32 // m.threads, int(warp) * 32
            size = int(size)
            if size < 32 or size > COLUMNS or size & (size - 1):
                raise Fault(f"{size} columns of tensor memory are asked for, expected 32, 64, .. 512", lane)
            if self._closed[block]:
                raise Fault("tensor memory is asked for after tcgen05.relinquish_alloc_permit", lane)
            free = [s for s in range(COLUMNS - size, -1, -size) if not self._taken[block, s : s + size].any()]
            if not free:
                raise Fault(f"{size} columns of tensor memory are asked for, and so many are not free", lane)
            start = free[0]
            self._size[block, start] = size
            self._taken[block, start : start + size] = True
            words[block, start : start + size] = _POISON
            m.shared[4][m.shared_index(m.full(base), offset, np.array([lane]), 4)] = start

    def dealloc(self, address: Array, mask: Array | None, count: Array) -> None:
        """Gives columns back."""
        self._made()
        warps = self._whole_warps(mask)
        sizes = self._of_warps(count, warps, "a number of columns")
        for warp, start, size in zip(warps, self._of_warps(address, warps, "an address"), sizes, strict=True):
            block, lane, start, size = int(warp) * 32 // self.machine.threads, int(warp) * 32, int(start), int(size)
            if start >= COLUMNS or self._size[block, start] != size:
                raise Fault(f"no {size} columns of tensor memory were allocated at 0x{start:x}", lane)
            columns = np.arange(start, start + size)[None]
            self._check(np.array([block]), 0, columns, 15, lane)
            self._check(np.array([block]), 1, columns, 15, lane)
            self._size[block, start] = 0
            self._taken[block, start : start + size] = False

    def relinquish(self, mask: Array | None) -> None:
        """Allocates no more."""
        self._made()
        self._closed[self._whole_warps(mask) * 32 // self.machine.threads] = True

    def _check(self, blocks: Array, half: int | Array, columns: Array, refused: int, lane: int) -> None:
        """Faults on columns [block, n] that are not allocated, or have a mark that is refused."""
        beyond = columns >= COLUMNS
        taken = self._taken[blocks[:, None], np.minimum(columns, COLUMNS - 1)] & ~beyond
        if not taken.all():
            raise Fault(f"column {int(columns[~taken][0])} of tensor memory is not allocated", lane)
        marks = self._marks[blocks[:, None], half, columns] & refused
        if marks.any():
            at = tuple(n[0] for n in np.nonzero(marks))
            mark = int(marks[at]) & -int(marks[at])
            raise Fault(f"column {int(columns[at])} of tensor memory {_OPEN[mark]}", lane)

    # --- loads and stores

    def _access(
        self, address: Array, offset: int, warps: Array, layout: tuple[Array, Array], refused: int, mark: int
    ) -> Array:
        """Places [warp, register, thread] in `_words`, checked and marked."""
        at = self._of_warps(address, warps, "an address") + offset
        blocks, quarter = warps * 32 // self.machine.threads, warps % (self.machine.threads // 32) % 4 * 32
        away = (at >> 16) - quarter  # of the address, in the lanes that the warp may touch
        rows, columns = layout
        wrong = (away < 0) | (away + int(rows.max()) >= 32) | (away % 16 != 0)
        if wrong.any():
            n = int(np.flatnonzero(wrong)[0])
            text = f"lane {int(at[n] >> 16)} of tensor memory is touched by a warp that may touch lanes"
            raise Fault(f"{text} {quarter[n]} to {quarter[n] + 31}", int(warps[n]) * 32)
        for begin in np.unique(away):
            mine = away == begin
            for half in (0, 1):
                touched = np.unique(columns[(rows + begin) >> 4 == half])
                if touched.size:
                    span = (at[mine] & 0xFFFF)[:, None] + touched
                    self._check(blocks[mine], half, span, refused, int(warps[mine][0]) * 32)
                    self._marks[blocks[mine][:, None], half, span] |= mark
        lane, first = (at >> 16)[:, None, None] + rows, (at & 0xFFFF)[:, None, None] + columns
        return (blocks[:, None, None] * COLUMNS + first) * LANES + lane

    def load(
        self, address: Array, offset: int, mask: Array | None, shape: str, registers: int, half: int
    ) -> Sequence[Array]:
        """tcgen05.ld: the registers of whole warps."""
        words, warps = self._made(), self._whole_warps(mask)
        if not warps.size:
            return [np.zeros(1, np.uint32)] * registers
        index = self._access(address, offset, warps, places(shape, registers, half), _WRITTEN | _STORED, _LOADED)
        out = np.zeros((registers, self.machine.lanes // 32, 32), np.uint32)
        out[:, warps] = words.reshape(-1)[index.swapaxes(0, 1)]
        return list(out.reshape(registers, -1))

    def store(
        self, address: Array, offset: int, mask: Array | None, shape: str, values: Sequence[Array], half: int
    ) -> None:
        """tcgen05.st, the inverse of load."""
        words, warps = self._made(), self._whole_warps(mask)
        if not warps.size:
            return
        layout = places(shape, len(values), half)
        index = self._access(address, offset, warps, layout, _WRITTEN | _READ | _LOADED, _STORED)
        given = np.stack([self.machine.full(v).reshape(-1, 32)[warps] for v in values], 1)
        words.reshape(-1)[index] = given

    def wait(self, mask: Array | None, stores: bool) -> None:
        """tcgen05.wait: loads or stores of these threads are done."""
        self._made()
        at = self.machine.active(mask)
        blocks = slice(None) if at is None else np.unique(at // self.machine.threads)
        self._marks[blocks] &= np.uint8(0xFF ^ (_STORED if stores else _LOADED))

    # --- products

    def mma(
        self,
        d: Array,
        d_offset: int,
        a: Array,
        a_offset: int | None,
        b: Array,
        descriptor: Array,
        keep: Array,
        mask: Array | None,
        kind: str,
    ) -> None:
        """tcgen05.mma: queues D = A·B (+ D where `keep`); A is in tensor memory when it has an offset."""
        m = self.machine
        self._made()
        lanes, blocks = self._threads(mask)
        if not lanes.size:
            return
        forms = self._picked(descriptor, lanes)
        at, first = self._picked(d, lanes) + d_offset, self._picked(a, lanes)
        for value in np.unique(forms):
            same = forms == value
            shape = form(int(value), kind)
            place = at[same]
            product = _Product(
                blocks[same], shape, place >> 16, place & 0xFFFF, first[same], a_offset is not None,
                self._picked(b, lanes)[same], m.full(keep)[lanes][same],
            )  # fmt: skip
            if a_offset is not None:
                product = self._a_here(product, first[same] + a_offset, int(lanes[0]))
            else:
                self._check_tiles(product.a, shape.m, shape.k, floats.SIZE[shape.left], shape.slow[0])
            self._check_tiles(product.b, shape.n, shape.k, floats.SIZE[shape.right], shape.slow[1])
            if (product.lane % 16).any() or (product.lane > (16 if shape.m == 64 else 0)).any():
                raise Fault(f"a product of {shape.m} rows begins at lane {int(product.lane.max())}", int(lanes[0]))
            self._queue.append(product)
            self._mark(product, int(lanes[0]), _STORED | _LOADED, _STORED)

    def _check_tiles(self, descriptors: Array, rows: int, k: int, size: int, k_slow: bool) -> None:
        for value in np.unique(descriptors):
            if int(value) >> 46 & 0x807F != 1:  # 1, no base offset, no absolute address, swizzled by whole 16 bytes
                raise Fault(f"the matrix descriptor 0x{int(value) & (1 << 64) - 1:x} is not emulated", 0)
        check_tiles(self.machine, descriptors, rows, k, size, k_slow)

    def _picked(self, value: Array, lanes: Array) -> Array:
        return np.broadcast_to(self.machine.pick(value, lanes), lanes.shape).astype(np.int64)

    def _a_here(self, product: _Product, at: Array, lane: int) -> _Product:
        if ((at >> 16) != product.lane).any():
            raise Fault("A and D of a product begin at different lanes of tensor memory", lane)
        if product.form.slow[0]:
            raise Fault("A in tensor memory has K as its fast axis", lane)
        return replace(product, a=at & 0xFFFF)

    def _mark(self, product: _Product, lane: int, refused_d: int, refused_a: int) -> None:
        """Checks and marks the columns of a product that is to run."""
        shape, blocks = product.form, product.blocks
        halves = (0, 1) if shape.m == LANES else (product.lane[:, None] >> 4,)
        spans = [(product.column, shape.n, refused_d, _WRITTEN)]
        if product.a_here:
            spans.append((product.a, _K_BYTES // 4, refused_a, _READ))
        for first, count, refused, mark in spans:
            columns = first[:, None] + np.arange(count)
            for half in halves:
                self._check(blocks, half, columns, refused, lane)
                self._marks[blocks[:, None], half, columns] |= mark

    def commit(self, base: Array, offset: int, mask: Array | None) -> None:
        """tcgen05.commit: an arrival when all that was issued before is done."""
        m = self.machine
        self._made()
        lanes, blocks = self._threads(mask)
        if lanes.size:
            m.shared_index(m.full(base), offset, lanes, 8)
            self._queue.append(_Commit(blocks, self._picked(base, lanes) + offset))
            self._issuer[blocks] = -1

    def settle(self, index: Array, parity: Array) -> None:
        """Runs what was committed to the barriers that lanes wait for, in its order, until their phases end."""
        m = self.machine
        while self._queue:
            waiting = np.broadcast_to(m.shared[8][index] >> np.uint64(63) == (parity & 1), index.shape)
            found = None
            for number, entry in enumerate(self._queue):
                if isinstance(entry, _Commit):
                    there = np.isin(self._barrier(entry), index[waiting])
                    if there.any():
                        found = number, entry.blocks[there]
                        break
            if found is None:
                return
            self._run(*found)

    def _barrier(self, commit: _Commit) -> Array:
        return (self.machine.shared_base[commit.blocks * self.machine.threads] + commit.barrier) >> 3

    def _run(self, last: int, blocks: Array) -> None:
        """Runs the queue of some blocks up to an entry."""
        left: list[_Product | _Commit] = []
        for entry in self._queue[: last + 1]:
            there = np.isin(entry.blocks, blocks)
            if not there.all():
                left.append(entry.of(~there))
            if there.any():
                part = entry.of(there)
                if isinstance(part, _Commit):
                    self.machine.barriers.arrived(self._barrier(part))
                else:
                    self._multiply(part)
        self._queue = left + self._queue[last + 1 :]
        self._marks[blocks] &= np.uint8(0xFF ^ (_WRITTEN | _READ))
        for entry in self._queue:
            if isinstance(entry, _Product):
                self._mark(entry, 0, 0, 0)

    def _multiply(self, product: _Product) -> None:
        """Products are exact, summed in float64 and added to D once, as those of wgmma."""
        shape, blocks, words, m = product.form, product.blocks[:, None, None], self._words, self.machine
        assert words is not None
        bases = m.shared_base[product.blocks * m.threads]
        rows = product.lane[:, None, None] + rows_of(shape.m)
        if product.a_here:
            columns = product.a[:, None, None] + np.arange(_K_BYTES // 4)
            packed = np.ascontiguousarray(words[blocks, columns, rows.swapaxes(1, 2)])
            bits = packed.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[floats.SIZE[shape.left]])
        else:
            bits = m.tensor.tile(product.a, bases, shape.m, shape.k, shape.left, shape.slow[0])
        first = floats.widen(bits, shape.left).astype(np.float64)
        bits = m.tensor.tile(product.b, bases, shape.n, shape.k, shape.right, shape.slow[1])
        second = shape.sign * floats.widen(bits, shape.right).astype(np.float64)
        made = np.matmul(second, first.swapaxes(1, 2)).astype(shape.out)  # [block, column, row]
        columns = product.column[:, None, None] + np.arange(shape.n)[:, None]
        if product.keep.any():
            old = words[blocks, columns, rows].view(shape.out)
            made = np.where(product.keep[:, None, None], made + old, made)
        words[blocks, columns, rows] = made.view(np.uint32)
