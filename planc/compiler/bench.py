"""How fast is a plan here, and where does the time go? In goes a plan for this CPU, out come rates and a row a kernel.

A kernel's share of the roofline is the time that its bytes and operations need at the least, by what the machine was
measured to do just before, over the time that it took. What lies in a cache may be read faster than memory.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from planc.codegen.work import PRODUCTS, Step, Work, first_weight, work
from planc.compiler.ir import text
from planc.compiler.ir.graph import Graph, Node
from planc.compiler.ir.ops import OPS
from planc.errors import PlancError, UsageError
from planc.plans import store
from planc.plans.host import usable_cores
from planc.plans.schema import Plan
from planc.runtime.batch import Piece, packed
from planc.runtime.cpu import CpuExecutor, check_threads
from planc.runtime.executors import kv_memory

READ, FMA, DOTS, BF16 = range(4)  # what CpuExecutor.limit measures
_ROUNDS = 5  # steps that are profiled: medians of each launch
_SECONDS = 0.5  # that a limit is measured for


@dataclass(frozen=True)
class Limits:
    """What this machine does at most: GB/s read from memory, 10^9 operations a second on f32, on 8-bit integers and on
    bf16, as the plan's target multiplies them (16-bit integers and f32 where it has no more).
    """

    read_gbs: float
    float_gops: float
    int_gops: float
    bf16_gops: float

    @classmethod
    def measured(cls, executor: CpuExecutor, threads: int, seconds: float) -> "Limits":
        """Those of so many threads, each measured for so long."""
        return cls(*(executor.limit(what, threads, seconds) / 1e9 for what in (READ, FMA, DOTS, BF16)))

    def seconds(self, done: Work) -> float:
        """The least time for this work."""
        rate = {"i8": self.int_gops, "f32": self.float_gops}.get(done.dtype, self.bf16_gops)
        return max(done.nbytes / self.read_gbs, done.operations / rate) / 1e9


@dataclass(frozen=True)
class KernelTime:
    """Launches of a kernel in a step: together, what they took, their share of the step, GB/s and 10^9 operations/s,
    and the share of the roofline that they reach.
    """

    kernel: str
    launches: int
    milliseconds: float
    share: float
    gbs: float
    gops: float
    roofline: float


@dataclass(frozen=True)
class Case:
    """Steps of one kind: a prompt of `tokens`, or one of each of `seqs` sequences; they look at `context` tokens, of a
    prompt in several steps those of the first. Medians. `roofline` is the share of the time that all its kernels need
    at the least. Of `kernels` each launch was timed, in other steps.
    """

    step: str
    tokens: int
    seqs: int
    context: int
    milliseconds: float
    tokens_per_s: float
    roofline: float
    kernels: tuple[KernelTime, ...]


@dataclass(frozen=True)
class Report:
    """All cases of a plan."""

    model: str
    target: str
    dtype: str
    threads: int
    limits: Limits
    cases: tuple[Case, ...]

    def data(self) -> dict[str, object]:
        """As JSON has it."""
        return asdict(self)


@dataclass(frozen=True)
class Request:
    """What to measure: decode steps of these numbers of sequences behind `input_len` tokens each, over `output_len`
    steps, and a prompt of `input_len` tokens.
    """

    batches: tuple[int, ...] = ()
    input_len: int | None = None  # None: 512, or what the plan holds
    output_len: int | None = None  # None: 32, or what it holds
    threads: int | None = None


@dataclass(frozen=True)
class _Sizes:
    """A request that fits the plan."""

    batches: tuple[int, ...]
    input_len: int
    output_len: int


def bench(root: Path, request: Request, say: Callable[[str], None] = lambda line: None) -> Report:
    """Measures a plan. UsageError for sizes beyond its limits, PlancError for a plan that this machine does not run."""
    plan = store.load(root)
    sizes = _checked(root, plan, request)
    check_threads(request.threads)
    threads = request.threads or usable_cores()
    graph = text.read(root / store.GRAPH)
    pages = -(-(sizes.input_len + sizes.output_len) // plan.kv.block_size)
    _check_memory(root, plan, max(sizes.batches) * pages)
    executor = CpuExecutor(root, plan, max(sizes.batches) * pages, threads)
    try:
        say("measuring what this machine does at most")
        limits = Limits.measured(executor, threads, _SECONDS)
        executor.fill_cache()
        cases = tuple(_Bench(executor, plan, graph, limits, pages, say).cases(sizes))
    finally:
        executor.close()
    return Report(plan.model.name, plan.target, plan.options.dtype, threads, limits, cases)


def lines(report: Report) -> Iterator[str]:
    """The report for people: what the machine does, then each case with its kernels."""
    limits = report.limits
    yield (
        f"{report.model} {report.dtype}, {report.target}, {report.threads} threads; this machine reads "
        f"{limits.read_gbs:.1f} GB/s, does {limits.float_gops:.0f} GFLOP/s on f32, {limits.bf16_gops:.0f} on bf16, "
        f"{limits.int_gops:.0f} GOP/s on codes"
    )
    for case in report.cases:
        what = f"{case.step}, {case.tokens} tokens" if case.step == "prefill" else f"{case.step}, batch {case.seqs}"
        yield ""
        yield (
            f"{what}, context {case.context}: {case.tokens_per_s:,.1f} tokens/s, {case.milliseconds:.2f} ms, "
            f"{case.roofline:.0%} of the roofline"
        )
        yield f"  {'kernel':<40} {'calls':>5} {'ms':>9} {'share':>6} {'GB/s':>7} {'GOP/s':>7} {'roofline':>8}"
        for k in case.kernels:
            yield (
                f"  {k.kernel:<40} {k.launches:>5} {k.milliseconds:>9.3f} {k.share:>6.1%} {k.gbs:>7.1f} {k.gops:>7.1f} "
                f"{k.roofline:>8.0%}"
            )
    if any(k.roofline > 1 for case in report.cases for k in case.kernels):
        yield ""
        yield "Above 100 %: what a kernel reads lies in a cache, which is faster than memory."


def _check_memory(root: Path, plan: Plan, blocks: int) -> None:
    """UsageError when the cache would not fit beside the weights: all of it is written."""
    need, free = blocks * plan.kv.page_bytes, kv_memory(root, plan, 0.9)
    if need > free:
        raise UsageError(
            f"the KV cache of these sequences takes {need / 2**30:.1f} GiB, and {max(free, 0) / 2**30:.1f} GiB are "
            "free for it; lower --batch or --input-len"
        )


def _checked(root: Path, plan: Plan, request: Request) -> _Sizes:
    """What to measure, where it is not said as the plan allows."""
    if plan.is_cuda:
        raise PlancError(
            f"{root} is for {plan.target}; planc bench measures plans for this CPU. On a machine with the GPU, "
            "benchmarks/gpu_check.sh measures this one."
        )
    if plan.limits.ranks > 1:
        raise PlancError(f"{root} has {plan.limits.ranks} ranks; planc bench measures plans of one, built with --tp 1.")
    limits = plan.limits
    asked = [n for n in (request.input_len, request.output_len, *request.batches) if n is not None]
    if min(asked, default=1) < 1:
        raise UsageError("--batch, --input-len and --output-len are at least 1")
    most_len = limits.max_model_len
    output = request.output_len or min(32, most_len // 2)
    prompt = request.input_len or max(1, min(512, most_len - output))
    most = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    if max(request.batches, default=1) > most:
        raise UsageError(
            f"--batch {max(request.batches)} is more than the plan's {most} sequences a step (--max-num-seqs and "
            "--max-num-batched-tokens of planc build)"
        )
    if prompt + output > most_len:
        raise UsageError(
            f"--input-len {prompt} and --output-len {output} make more than the plan's {most_len} tokens "
            "(--max-model-len of planc build)"
        )
    return _Sizes(request.batches or tuple(n for n in (1, 8, 32) if n <= most), prompt, output)


class _Bench:
    """A plan as it is measured: each sequence has `pages` pages in a row."""

    def __init__(
        self,
        executor: CpuExecutor,
        plan: Plan,
        graph: Graph,
        limits: Limits,
        pages: int,
        say: Callable[[str], None],
    ) -> None:
        self._executor, self._plan, self._graph = executor, plan, graph
        self._limits, self._pages, self._say = limits, pages, say
        self._nodes = [n for n in graph.nodes if not OPS[n.op].view]
        self._random = np.random.default_rng(0)

    def cases(self, sizes: _Sizes) -> Iterator[Case]:
        yield self._prefill(sizes.input_len)
        for n in sizes.batches:
            yield self._decode(n, sizes.input_len, sizes.output_len)

    def _prefill(self, length: int) -> Case:
        """A prompt of so many tokens; its first step is the one that is looked into."""
        self._say(f"prefill of {length} tokens")
        size = min(length, self._plan.limits.max_num_batched_tokens)
        pieces = [Piece(self._ids(min(size, length - at)), at, 0) for at in range(0, length, size)]
        for p in pieces:
            self._timed([p])  # the first step of a size pays for pages that are touched for the first time
        took = [sum(self._timed([p]) for p in pieces) for _ in range(3)]
        steps = [Step(len(p.ids), 1, 1, p.start + len(p.ids)) for p in pieces]
        return self._case("prefill", float(np.median(took)), length, steps, [pieces[0]])

    def _decode(self, seqs: int, context: int, steps: int) -> Case:
        """A token of each sequence, step after step."""
        self._say(f"decode of {seqs} sequences behind {context} tokens")
        first = [Piece(self._ids(1), context, i * self._pages) for i in range(seqs)]
        self._timed(first)
        took = []
        for at in range(context, context + steps):
            took.append(self._timed([Piece(self._ids(1), at, i * self._pages) for i in range(seqs)]))
        return self._case("decode", float(np.median(took)), seqs, [Step(seqs, seqs, seqs, context + 1)], first)

    def _ids(self, count: int) -> list[int]:
        return [int(i) for i in self._random.integers(0, self._plan.limits.vocab_size, count)]

    def _timed(self, pieces: Sequence[Piece]) -> float:
        batch = packed(pieces, self._executor.block_size)
        start = time.perf_counter()
        self._executor.step(batch)
        return time.perf_counter() - start

    def _case(self, name: str, seconds: float, tokens: int, steps: Sequence[Step], pieces: Sequence[Piece]) -> Case:
        """`seconds` are those of all the steps; of the first, `pieces`, each launch is timed."""
        step = steps[0]
        batch = packed(pieces, self._executor.block_size)
        took = np.median([self._executor.profile(batch) for _ in range(_ROUNDS)], axis=0) / 1e9
        if len(took) != len(self._nodes):
            raise PlancError(
                f"the plan's program has {len(took)} launches, its graph {len(self._nodes)}; build it again"
            )
        found: dict[str, list[tuple[float, Work]]] = {}
        for n, s in zip(self._nodes, took.tolist(), strict=True):
            found.setdefault(self._label(n), []).append((s, work(n, self._graph.types, step)))
        whole = float(took.sum())
        kernels = sorted((self._kernel(k, v, whole) for k, v in found.items()), key=lambda k: -k.milliseconds)
        least = sum(self._limits.seconds(work(n, self._graph.types, s)) for s in steps for n in self._nodes)
        return Case(
            name, tokens, step.seqs, step.context, seconds * 1e3, tokens / seconds, least / seconds, tuple(kernels)
        )

    def _kernel(self, label: str, rows: Sequence[tuple[float, Work]], whole: float) -> KernelTime:
        seconds = sum(s for s, _ in rows)
        moved, done = (sum(x) for x in zip(*((w.nbytes, w.operations) for _, w in rows), strict=True))
        least, took = sum(self._limits.seconds(w) for _, w in rows), max(seconds, 1e-9)
        share = seconds / whole if whole else 0.0
        return KernelTime(label, len(rows), seconds * 1e3, share, moved / took / 1e9, done / took / 1e9, least / took)

    def _label(self, n: Node) -> str:
        """The op, of products with N x K and how the weight is stored, which tells its kernels apart."""
        if n.op not in PRODUCTS:
            return n.op
        types = [self._graph.types[i] for i in n.inputs]
        store = str(n.attr("scheme", "")) or types[first_weight(n)].dtype
        return f"{n.op} {types[first_weight(n)].shape[-2]}x{types[0].shape[-1]} {store}"
