"""Lowering to CUDA: in goes a planned graph, an SM and buckets, out come kernels and the launches of each bucket.

A bucket is a fixed size of step; its launches become one CUDA graph, whose edges come from the bytes that launches read
and write. Values keep the addresses that the memory pass gave them for the largest step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from planc.codegen.cuda import collective
from planc.codegen.cuda.call import Bucket, Call, Ref, TritonKernel, calls, page_table
from planc.codegen.cuda.hazards import Hazards, Span
from planc.codegen.cuda.sampling import HISTORY, Sampling
from planc.codegen.cuda.tiles import Choice, Tiles
from planc.compiler.ir.graph import Graph, Node
from planc.compiler.ir.ops import APPENDS, OPS
from planc.errors import PlancError
from planc.plans import ranks
from planc.plans.launches import INPUTS, KV, Arg, Binary, Buffer, Launch, LaunchPlan, StepGraph, input_buffers
from planc.plans.ranks import SHARED
from planc.plans.sampling import RECORDS, SAMPLED
from planc.plans.schema import ProductTile

_ALIGN = 256  # bytes, as cudaMalloc aligns
_SCRATCH = "scratch"
_SMALLEST_PREFILL = 64  # tokens; a shorter prompt costs what one of this length does


@dataclass(frozen=True)
class Limits:
    """The largest step: tokens, sequences, and pages of one sequence."""

    tokens: int
    seqs: int
    pages: int


@dataclass(frozen=True)
class Lowered:
    """Kernels to compile, a launch plan that lacks their binaries, and how products are cut, each with the name of the
    kernel that runs it.
    """

    kernels: tuple[TritonKernel, ...]
    plan: LaunchPlan
    products: tuple[tuple[ProductTile, str], ...]

    def with_binaries(self, binaries: Sequence[Binary]) -> LaunchPlan:
        """The whole launch plan."""
        return replace(self.plan, binaries=tuple(binaries))

    @property
    def counts(self) -> Mapping[str, int]:
        """Launches of each kernel over all buckets."""
        found: dict[str, int] = {}
        for graph in self.plan.graphs:
            for launch in graph.launches:
                found[launch.kernel] = found.get(launch.kernel, 0) + 1
        return found


def buckets(limits: Limits) -> tuple[Bucket, ...]:
    """Decode steps of 1, 2, 4, .. sequences with a token each, then steps of 64, 128, .. tokens, up to the largest."""
    decode = [Bucket(n, n, n) for n in _powers(1, min(limits.seqs, limits.tokens))]
    prefill = [Bucket(n, min(n, limits.seqs), min(n, limits.seqs)) for n in _powers(_SMALLEST_PREFILL, limits.tokens)]
    return tuple(dict.fromkeys([*decode, *prefill]))


def _powers(first: int, last: int) -> list[int]:
    found = [n for n in (first << i for i in range(32)) if n < last]
    return [*found, last]


def lower(graph: Graph, sm: int, limits: Limits, wanted: Sequence[Bucket], tiles: Tiles | None = None) -> Lowered:
    """The launches of every bucket of a graph that the select and memory passes have been over; `tiles` cuts products.

    PlancError names a node that no kernel runs, or a value without an address.
    """
    lowering = _Lowering(graph, sm, limits, tiles or Tiles.default(sm))
    graphs = tuple(lowering.step(bucket) for bucket in wanted)
    plan = LaunchPlan(
        sm=sm,
        binaries=(),
        buffers=tuple(lowering.buffers.values()),
        arenas=lowering.arenas,
        graphs=graphs,
        logits=graph.outputs[0],
        page_table_stride=limits.pages,
    )
    return Lowered(tuple(lowering.kernels.values()), plan, tuple(lowering.products()))


def sampling(graph: Graph, pages: int) -> Sampling:
    """How tokens are chosen behind a graph, whose sequences have so many pages."""
    append = next(n for n in graph.nodes if n.op in APPENDS)
    page_bytes, block = (int(append.attr(name)) for name in ("page_bytes", "block"))  # type: ignore[arg-type]
    logits = graph.outputs[0]
    vocab = int(graph.types[logits].shape[-1])
    return Sampling(logits, vocab, page_bytes, block, pages, logits in aligned(graph))


def aligned(graph: Graph) -> frozenset[str]:
    """The values at a multiple of 16 bytes, which wide accesses need: inputs and weights all are."""
    addresses = {v.name: v.addr for n in graph.nodes for v in n.outputs}
    return frozenset(name for name in graph.types if (addresses.get(name) or 0) % 16 == 0)


class _Lowering:
    """What grows as buckets are lowered: kernels, buffers, the size of scratch memory."""

    def __init__(self, graph: Graph, sm: int, limits: Limits, tiles: Tiles) -> None:
        self.graph, self.sm, self.limits, self.tiles = graph, sm, limits, tiles
        self.chosen: dict[tuple[Bucket, Choice, str], int] = {}  # launches of a tile in a bucket, by their kernel
        self.types = {**graph.types, **page_table(limits.pages)}
        self.kernels: dict[str, TritonKernel] = {}
        self.largest = Bucket(limits.tokens, limits.seqs, limits.seqs)
        self.addresses = {v.name: v.addr for n in graph.nodes for v in n.outputs}
        self.aligned = aligned(graph)
        self.weights = {w.name for w in graph.weights}
        self.arenas = {"weights": 0, KV: 0, "act": self._activations(), "io": 0}
        self.buffers: dict[str, Buffer] = {KV: Buffer(KV, KV, 0, 0)}
        self.buffer(graph.outputs[0])
        self._place(SAMPLED, "io", limits.seqs * 2 * 4)
        self.inputs_start = self.arenas["io"]  # of every bucket: a step has ended before the next one's come
        self.sampling = sampling(graph, limits.pages)
        together = next((n for n in graph.nodes if OPS[n.op].collective), None)
        if together is not None:
            count = int(together.attr("ranks"))  # type: ignore[arg-type]
            self.arenas[SHARED] = 0
            self._place(SHARED, SHARED, ranks.nbytes(count))
            added = collective.sum_of_parts(count)  # which no launch has: a runtime with NCCL makes them
            self.kernels[added.name] = added

    def _activations(self) -> int:
        ends = [a + self.types[n].extent(self.largest.dims) for n, a in self.addresses.items() if a is not None]
        return _aligned(max(ends, default=0))

    def _place(self, name: str, arena: str, nbytes: int) -> None:
        """Puts a buffer at the end of an arena."""
        self.buffers[name] = Buffer(name, arena, self.arenas[arena], nbytes)
        self.arenas[arena] += _aligned(nbytes)

    def buffer(self, name: str) -> Buffer:
        """The buffer of a value, made on its first use."""
        if name in self.buffers:
            return self.buffers[name]
        if name in self.weights:
            self._place(name, "weights", self.types[name].nbytes())
        else:
            address = self.addresses.get(name)
            if address is None:
                raise PlancError(f"%{name} has no address; run the memory pass first")
            self.buffers[name] = Buffer(name, "act", address, self.types[name].extent(self.largest.dims))
        return self.buffers[name]

    def step(self, bucket: Bucket) -> StepGraph:
        """The launches of a bucket."""
        hazards, launches = Hazards(), list[Launch]()
        for node in self.graph.nodes:
            made = self._calls(node, bucket)
            scratch = self._scratch(made)
            launches += [self._launch(call, node, bucket, scratch, hazards) for call in made]
        made = self.sampling.calls(bucket)
        scratch = self._scratch(made)
        launches += [self._launch(call, None, bucket, scratch, hazards) for call in made]
        return StepGraph(bucket.tokens, bucket.seqs, bucket.rows, self._inputs(bucket), tuple(launches))

    def _inputs(self, bucket: Bucket) -> tuple[Buffer, ...]:
        """The inputs of a bucket, for which `io` has room behind what is chosen."""
        sizes = (bucket.tokens, bucket.seqs, bucket.rows)
        found = input_buffers(sizes, self.limits.pages, True, self.inputs_start)
        self.arenas["io"] = max(self.arenas["io"], _aligned(found[-1].offset + found[-1].nbytes))
        return found

    def _launch(
        self, call: Call, node: Node | None, bucket: Bucket, scratch: Mapping[str, tuple[int, int]], hazards: Hazards
    ) -> Launch:
        """A kernel's launch; the node is None behind the graph, where tokens are chosen."""
        self.kernels.setdefault(call.kernel.name, call.kernel)
        if call.choice is not None:
            key = bucket, call.choice, call.kernel.name
            self.chosen[key] = self.chosen.get(key, 0) + 1
        args = tuple(self._arg(ref, scratch) for ref in call.args)
        reads, writes = (self._spans(side, node, scratch, bucket) for side in (call.reads, call.writes))
        return Launch(call.kernel.name, call.grid, args, hazards.add(reads, writes))

    def products(self) -> Iterator[tuple[ProductTile, str]]:
        """How products are cut, and by which kernel."""
        for (bucket, c, name), count in self.chosen.items():
            took = round(c.cost.seconds * 1e6, 3)
            yield ProductTile(bucket.tokens, count, c.product, c.tile, took, c.cost.bound, c.measured), name

    def _calls(self, node: Node, bucket: Bucket) -> tuple[Call, ...]:
        if OPS[node.op].collective:
            return collective.calls(node, self.types, bucket)
        return calls(node, self.types, self.sm, bucket, self.aligned, self.tiles)

    def _scratch(self, made: Sequence[Call]) -> dict[str, tuple[int, int]]:
        """Where a node's scratch buffers begin and end; one node after the other uses the same bytes."""
        spans, end = {}, 0
        for name, nbytes in {n: b for call in made for n, b in call.scratch.items()}.items():
            spans[name] = (end, end + nbytes)
            end += _aligned(nbytes)
        have = self.buffers.get(_SCRATCH)
        if end and (have is None or have.nbytes < end):
            start = have.offset if have else self.arenas["act"]
            self.buffers[_SCRATCH] = Buffer(_SCRATCH, "act", start, end)
            self.arenas["act"] = start + end  # scratch is the last of its arena
        return spans

    def _arg(self, ref: Ref, scratch: Mapping[str, tuple[int, int]]) -> Arg:
        if ref.kind == "scratch":
            return Arg("buffer", _SCRATCH, scratch[str(ref.value)][0] + ref.offset)
        if ref.value in (*INPUTS, RECORDS):
            return Arg("buffer", str(ref.value), ref.offset)
        if ref.kind == "value":
            return Arg("buffer", self.buffer(str(ref.value)).name, ref.offset)
        return Arg(ref.kind, ref.value)

    def _spans(
        self, names: Sequence[str], node: Node | None, scratch: Mapping[str, tuple[int, int]], bucket: Bucket
    ) -> list[Span]:
        """The bytes of values and scratch buffers, of the cache the node's layer; nothing for what no launch writes."""
        found: list[Span] = []
        for name in names:
            if name in scratch:
                found.append((_SCRATCH, *scratch[name]))
            elif name in (HISTORY, SHARED):  # all ranks make their collectives in one order: each waits for the last
                found.append((name, 0, 1))
            elif name == KV and node is not None:
                layer = int(node.attr("layer"))  # type: ignore[arg-type]
                found.append((KV, layer, layer + 1))
            elif name not in self.weights and name not in (*INPUTS, RECORDS, SAMPLED):
                buffer = self.buffer(name)
                found.append((buffer.arena, buffer.offset, buffer.offset + self.types[name].extent(bucket.dims)))
        return found


def _aligned(n: int) -> int:
    return -(-n // _ALIGN) * _ALIGN
