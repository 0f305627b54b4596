"""Kernels of a CUDA plan one by one: in goes a plan, out comes each one's error on random inputs at its own tile size.

Of a kernel with many blocks some are run, spread over the grid; what they write is compared, and nothing else may be
touched. So a model of any size is checked in minutes, its weights not needed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from planc.codegen.cuda import collective
from planc.codegen.cuda.call import Bucket, Call, Ref, calls, page_table
from planc.codegen.cuda.lower import aligned, sampling
from planc.codegen.cuda.tiles import Tiles, tiles_of
from planc.codegen.work import PRODUCTS, first_weight
from planc.compiler.emulate import Verdict
from planc.compiler.ir import text
from planc.compiler.ir.graph import Graph, Node
from planc.compiler.ir.ops import APPENDS, OPS
from planc.compiler.ir.types import DTYPES, PACKED, TensorType
from planc.compiler.weights import stored_shape
from planc.errors import PlancError
from planc.plans import launches, store
from planc.plans.launches import KV, Arg, Binary, LaunchPlan
from planc.plans.ranks import SUM
from planc.plans.sampling import SAMPLED
from planc.plans.schema import Plan

if TYPE_CHECKING:
    from planc.emulator.memory import Memory

_NUMBERS = 64  # integers of a value that points into nothing are below this
_BLOCKS = 6  # of a grid that are run
_SUMS = frozenset({*PRODUCTS, "paged_attention", "matmul"})
_MOST = {True: 0.01, False: 1e-4}  # relative RMS error of products, whose inputs are rounded to bf16, and of others
_NARROW = {1: 0.02, 2: 0.005}  # of results of so many bytes, which a last bit moves to the next number
_NOISE = 1 << 18  # random elements; larger inputs repeat them
_MEMORY = 64 << 30
_TOKENS = 8  # that are real in a step of more


@dataclass(frozen=True)
class _Case:
    """A node, the launches that run it in a bucket, and the types of all values."""

    node: Node
    calls: tuple[Call, ...]
    bucket: Bucket
    types: Mapping[str, TensorType]

    @property
    def name(self) -> str:
        kernels = "+".join(dict.fromkeys(c.kernel.name for c in self.calls))
        return f"{self.node.op} in steps of {self.bucket.tokens} tokens: {kernels}"


def each_kernel(root: Path, plan: Plan, seed: int) -> Iterator[Verdict]:
    """Every kernel of the plan on the smallest step that uses it. KernelFault is a verdict that does not hold."""
    from planc.compiler import emulate_ranks, emulate_sampling
    from planc.emulator.machine import KernelFault

    graph, held = text.read(root / store.GRAPH), launches.load(root)
    for case in _cases(graph, held, tiles_of(plan)):
        try:
            yield _checked(root, plan, graph, held, case, np.random.default_rng(seed))
        except KernelFault as e:
            yield Verdict(case.name, False, str(e))
    yield from emulate_ranks.check(root, held, plan.limits.ranks, seed)
    if SAMPLED in held.buffer:
        try:
            yield emulate_sampling.check(root, plan, graph, held, seed)
        except KernelFault as e:
            yield Verdict("token choice", False, str(e))


def _cases(graph: Graph, held: LaunchPlan, tiles: Tiles) -> Iterator[_Case]:
    """For each kernel of the plan, the first node of the smallest bucket that is run by it."""
    left = {b.name for b in held.binaries if not b.name.startswith(SUM)}
    if SAMPLED in held.buffer:
        left -= {c.kernel.name for c in sampling(graph, held.page_table_stride).calls(Bucket(1, 1, 1))}
    types = {**graph.types, **page_table(held.page_table_stride)}
    wide = aligned(graph)
    for step in held.graphs:
        bucket = Bucket(step.tokens, step.seqs, step.rows)
        for node in graph.nodes:
            if OPS[node.op].collective:  # which needs all ranks: see emulate_ranks
                left -= {c.kernel.name for c in collective.calls(node, types, bucket)}
                continue
            made = calls(node, types, held.sm, bucket, wide, tiles)
            if left & {c.kernel.name for c in made}:
                left -= {c.kernel.name for c in made}
                yield _Case(node, made, bucket, types)
        if not left:
            return
    raise PlancError(f"{len(left)} kernels of the plan run no node of its graph, first {min(left)}. Build it again.")


def _checked(root: Path, plan: Plan, graph: Graph, held: LaunchPlan, case: _Case, rng: np.random.Generator) -> Verdict:
    inputs = _Inputs(plan, graph, case, rng)
    arrays = {name: inputs.array(name) for name in dict.fromkeys(case.node.inputs)}
    outs = {v.name: _poisoned(v.type, case.bucket) for v in case.node.outputs}
    before = arrays[KV].copy() if KV in arrays else None
    _launch(root, held, case, arrays, outs)
    if not outs:
        assert before is not None
        wanted = before.copy()
        _reference(case, {**arrays, KV: wanted}, None)
        return _equal_bytes(case, arrays[KV], wanted, int((wanted != before).sum()))
    return _compared(case, arrays, outs)


def _poisoned(t: TensorType, bucket: Bucket) -> np.ndarray:
    """What nothing was written to: NaN, or the farthest code."""
    shape, dtype = [bucket.size(d) for d in t.shape], DTYPES[t.dtype]
    if dtype.kind == "i":
        return np.full(shape, np.iinfo(dtype).min, dtype)
    return np.full(shape, 0xFF, np.uint8).view(dtype) if t.itemsize == 1 else np.full(shape, np.nan, dtype)


def _launch(
    root: Path, held: LaunchPlan, case: _Case, arrays: Mapping[str, np.ndarray], outs: Mapping[str, np.ndarray]
) -> None:
    """Runs the calls in the emulator, each on some of its blocks unless all that it writes is looked at, by a later one
    or in the cache.
    """
    from planc.emulator.memory import Memory

    memory = Memory(_MEMORY)
    scratch = {n: np.zeros(size, np.uint8) for c in case.calls for n, size in c.scratch.items()}
    places = {n: memory.put(_laid_out(a, case.types.get(n))) for n, a in {**arrays, **outs, **scratch}.items()}
    for call in case.calls:
        whole = len(case.calls) > 1 or not outs
        blocks = np.arange(prod(call.grid)) if whole else _sample(prod(call.grid))
        execute(root, held, call, places, memory, blocks)
    for name, array in {**outs, **{n: a for n, a in arrays.items() if n == KV}}.items():
        array[...] = memory.get(places[name], array.shape, array.dtype)


def _sample(count: int) -> np.ndarray:
    """Blocks to run: the first and the last, and some between."""
    return np.unique(np.linspace(0, count - 1, min(count, _BLOCKS)).astype(int))


def _laid_out(array: np.ndarray, t: TensorType | None) -> np.ndarray:
    """The bytes as they lie on the device: a strided view among the columns of a wider buffer."""
    if t is None or not t.layout.startswith("strides:"):
        return np.ascontiguousarray(array)
    row = t.strides()[0]
    wide = np.full((len(array), row), np.nan, array.dtype)
    inner = np.lib.stride_tricks.as_strided(
        wide, array.shape, [s * array.itemsize for s in t.strides()], writeable=True
    )
    inner[...] = array
    return wide


def execute(
    root: Path, held: LaunchPlan, call: Call, places: Mapping[str, int], memory: "Memory", blocks: np.ndarray
) -> None:
    """Runs some blocks of a call whose buffers lie at `places` of the emulator's memory."""
    from planc.emulator.machine import Grid, run
    from planc.emulator.run import program

    binary = held.binary[call.kernel.name]
    found = program((root / binary.ptx).read_text())
    params = _parameters(binary, call, places, found.kernel.param_bytes)
    run(found, Grid(call.grid, binary.threads, binary.shared), params, memory, blocks=blocks)


def _parameters(binary: Binary, call: Call, places: Mapping[str, int], size: int) -> bytes:
    buffer = bytearray(size)
    for (offset, width), ref in zip(binary.params, call.args, strict=False):
        buffer[offset : offset + width] = launches.pack(*_argument(ref, places))
    return bytes(buffer)


def _argument(ref: Ref, places: Mapping[str, int]) -> tuple[Arg, int]:
    """An argument as a launch plan has it, and the address of its buffer."""
    if ref.kind in ("value", "scratch"):
        return Arg("buffer", str(ref.value), ref.offset), places[str(ref.value)]
    return Arg(ref.kind, ref.value), 0


class _Inputs:
    """Random inputs of a node that mean something: ids in range, pages that exist, a cache that was written."""

    def __init__(self, plan: Plan, graph: Graph, case: _Case, rng: np.random.Generator) -> None:
        self.plan, self.graph, self.case, self.rng = plan, graph, case, rng
        self.noise = rng.standard_normal(_NOISE).astype(np.float32)
        bucket = case.bucket
        self.decode = bucket.tokens == bucket.seqs
        self.real = bucket.tokens if self.decode else min(bucket.tokens, _TOKENS)
        self.seqs = bucket.seqs if self.decode else 1
        self.past = min(21, plan.limits.max_model_len - self.real - 1)  # tokens that the cache holds already
        width = -(-(self.past + self.real) // plan.kv.block_size)
        self.table = rng.permutation(self.seqs * width).astype(np.int32).reshape(self.seqs, width)

    def array(self, name: str) -> np.ndarray:
        """An input by its name, padding of the bucket included."""
        made = getattr(self, f"_{name}", None)
        if name in (*launches.INPUTS, KV) and made is not None:
            return np.ascontiguousarray(made())
        t = self.case.types[name]
        if name in self.graph.weight_by_name:
            return self._weight(t)
        shape = [self.case.bucket.size(d) for d in t.shape]
        return self._values(t, shape)

    def _values(self, t: TensorType, shape: list[int]) -> np.ndarray:
        dtype = DTYPES[t.dtype]
        if t.dtype in ("i32", "i64"):
            most = self._most_index()
            return self.rng.integers(0, most, shape).astype(dtype)
        if t.dtype == "i8":
            return self.rng.integers(-127, 128, shape).astype(dtype)
        if t.dtype == "bool":
            return self.rng.integers(0, 2, shape).astype(dtype)
        return np.resize(self.noise, shape).astype(dtype)

    def _most_index(self) -> int:
        """Rows of what integers of this node point into: experts, or places of a row."""
        node, types = self.case.node, self.case.types
        if node.op in ("expert_linear", "qexpert_linear"):
            return next(int(types[i].shape[0]) for i in node.inputs if i in self.graph.weight_by_name)
        last = types[node.inputs[0]].shape[-1]
        return last if isinstance(last, int) else _NUMBERS  # one integer a token, such as an id

    def _weight(self, t: TensorType) -> np.ndarray:
        shape = list(stored_shape(t))
        if t.dtype == "i32":  # features of a row, each once
            return np.sort(self.rng.permutation(self._most_index())[: shape[0]]).astype(np.int32)
        if t.dtype == "u4":
            return np.resize(self.rng.integers(0, 256, _NOISE).astype(np.uint8), shape)
        if t.dtype == "i8":
            return np.resize(self.rng.integers(-127, 128, _NOISE).astype(np.int8), shape)
        scales = self.case.node.op.startswith("q") and t.dtype == "f32"
        values = np.abs(self.noise) * 0.01 + 0.001 if scales else self.noise
        return np.resize(values.astype(DTYPES[t.dtype]), shape)

    def _padded(self, values: np.ndarray, size: int, fill: int) -> np.ndarray:
        return np.concatenate([values, np.full(size - len(values), fill)]).astype(np.int32)

    def _ids(self) -> np.ndarray:
        return self._padded(self.rng.integers(0, self.plan.limits.vocab_size, self.real), self.case.bucket.tokens, 0)

    def _positions(self) -> np.ndarray:
        first = np.full(self.real, self.past) if self.decode else self.past + np.arange(self.real)
        return self._padded(first, self.case.bucket.tokens, 0)

    def _slots(self) -> np.ndarray:
        block, at = self.plan.kv.block_size, self._positions()[: self.real]
        owner = np.arange(self.real) if self.decode else np.zeros(self.real, int)
        return self._padded(self.table[owner, at // block] * block + at % block, self.case.bucket.tokens, -1)

    def _page_table(self) -> np.ndarray:
        wide = np.zeros((self.case.bucket.seqs, int(self.case.types["page_table"].shape[1])), np.int32)
        wide[: self.seqs, : self.table.shape[1]] = self.table
        return wide

    def _query_start(self) -> np.ndarray:
        starts = np.arange(self.seqs + 1) if self.decode else np.array([0, self.real])
        return self._padded(starts, self.case.bucket.seqs + 1, self.real)

    def _logit_rows(self) -> np.ndarray:
        return self._padded(np.arange(min(self.real, self.case.bucket.rows)), self.case.bucket.rows, 0)

    def _kv(self) -> np.ndarray:
        """Pages with random keys and values of the node's layer, at every position up to the last."""
        kv = np.zeros((self.table.size, self.plan.kv.page_bytes), np.uint8)
        node = self.case.node
        write = next(n for n in self.graph.nodes if n.op in APPENDS and n.attr("layer") == node.attr("layer"))
        count = self.table.size * self.plan.kv.block_size
        first = APPENDS[write.op]
        shapes = [(count, *map(int, self.case.types[i].shape[1:])) for i in write.inputs[first : first + 2]]
        k, v = (np.resize(self.noise, shape) for shape in shapes)
        OPS["kv_append"].ref(dict(write.attrs), [k, v[::-1], np.arange(count, dtype=np.int32), kv], ())
        return kv


def _reference(case: _Case, arrays: Mapping[str, np.ndarray], columns: np.ndarray | None) -> tuple[np.ndarray, ...]:
    """What the op's reference makes of the arrays; of a product, only the wanted output channels."""
    node = case.node
    given, types = [], []
    first = first_weight(node) if node.op in PRODUCTS else None
    for at, name in enumerate(node.inputs):
        t, array = case.types[name], arrays[name]
        t = t if t.layout in PACKED else replace(t, layout="row")
        if columns is not None and first is not None and at >= first:
            axis = -2 if at == first else -1
            array = np.take(array, columns, axis)
            shape = list(t.shape)
            shape[axis] = len(columns)
            t = replace(t, shape=tuple(shape))
        given.append(array)
        types.append(t)
    return OPS[node.op].ref(dict(node.attrs), given, types)


def _compared(case: _Case, arrays: Mapping[str, np.ndarray], outs: Mapping[str, np.ndarray]) -> Verdict:
    real = _real_rows(case, arrays)
    columns = None
    if case.node.op.endswith("linear"):
        got = outs[case.node.out.name]
        columns = np.flatnonzero(~np.isnan(got.reshape(-1, got.shape[-1])).all(0))
        if not len(columns):
            return Verdict(case.name, False, "nothing was written")
    details, good = [], True
    for v, want in zip(case.node.outputs, _reference(case, arrays, columns), strict=True):
        rows = real if v.type.shape and isinstance(v.type.shape[0], str) else len(want)
        got = outs[v.name] if columns is None else outs[v.name][..., columns]
        ok, told = _error(case, got[:rows], want[:rows])
        good &= ok
        details.append(told)
    return Verdict(case.name, good, ", ".join(details))


def _real_rows(case: _Case, arrays: Mapping[str, np.ndarray]) -> int:
    """Rows of an output that are no padding; all of them where rows do not depend on the step's sequences."""
    start = arrays.get("query_start")
    return int(start[-1]) if start is not None else 1 << 30


def _error(case: _Case, got: np.ndarray, want: np.ndarray) -> tuple[bool, str]:
    if got.dtype.kind in "iu" and got.dtype.itemsize > 1:
        differ = int((got != want).sum())
        return differ == 0, f"{differ} of {got.size} indices differ"
    ours, theirs = got.astype(np.float64), want.astype(np.float64)
    written = got != np.iinfo(np.int8).min if got.dtype.kind == "i" else ~np.isnan(ours)  # as _poisoned left them
    if not written.any():
        return False, "nothing was written"
    error = np.sqrt(((ours - theirs)[written] ** 2).mean()) / max(np.sqrt((theirs[written] ** 2).mean()), 1e-12)
    most = max(_NARROW.get(got.dtype.itemsize, 0.0), _MOST[case.node.op in _SUMS])
    return bool(error <= most), f"relative error {error:.2g} of {int(written.sum()):,} values"


def _equal_bytes(case: _Case, got: np.ndarray, want: np.ndarray, changed: int) -> Verdict:
    """Of a cache in which `changed` bytes should change: every byte, but for codes that a scale's last bit moved."""
    differ = int((got != want).sum())
    most = changed // 50 if "k_scale_offset" in dict(case.node.attrs) else 0
    return Verdict(case.name, differ <= most, f"{differ} bytes of the cache differ, {changed} were to change")
