"""`planc tune`: in goes a plan, out comes tuning.json with the fastest way to cut each product on the machine here.

What a CPU does is in `tune_cpu.py`. On a GPU, of each product in each bucket the best tiles by the cost model are
compiled and run beside one another. The products that a step spends most time in come first; what is measured is in the
file at once, so that a run may end at any time and another go on.
"""

import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from planc.codegen.cuda import aot
from planc.codegen.cuda.call import Bucket, Call, calls, page_table
from planc.codegen.cuda.lower import aligned
from planc.codegen.cuda.tiles import Choice, Tiles, name_of, tiles_of
from planc.codegen.target import parse
from planc.codegen.work import PRODUCTS
from planc.compiler.ir import text
from planc.compiler.ir.graph import Graph, Node
from planc.compiler.ir.types import TensorType
from planc.compiler.progress import Progress
from planc.compiler.tune_cpu import tune_cpu
from planc.compiler.tune_measure import Candidate, Subject, race
from planc.compiler.tune_request import TuneRequest, checked
from planc.errors import PlancError
from planc.plans import launches, store, tuning
from planc.plans.launches import Binary, LaunchPlan
from planc.plans.schema import Plan
from planc.plans.tuning import CpuEntry, Entry, Product, Tuning
from planc.runtime.cuda_driver import Driver, Gpu

_BEST = 4  # tiles of a product, beside the plan's own
_WITHIN = 1.5  # of the best predicted time: the model is off by less, so slower tiles are not worth compiling


@dataclass
class _Job:
    """A product in a bucket: a node that computes it, and what the steps of all buckets spend in it by the model."""

    node: Node
    bucket: Bucket
    chosen: Choice
    seconds: float = field(default=0.0)


def tune(request: TuneRequest, progress: Progress) -> tuple[Entry, ...] | tuple[CpuEntry, ...]:
    """Measures until all products are done or the seconds are over, and returns what was measured.

    PlancError when this machine does not run the plan: it has no driver, its GPU is another, or its CPU lacks the ISA.
    UsageError for flags that the plan's target has no use for.
    """
    deadline = time.monotonic() + request.seconds
    plan, known = checked(request)
    measure = _tune_gpu if plan.is_cuda else tune_cpu
    return measure(request, plan, known, deadline, progress)


def _tune_gpu(
    request: TuneRequest, plan: Plan, known: Tuning, deadline: float, progress: Progress
) -> tuple[Entry, ...]:
    target = name_of(parse(plan.target))
    entries = {(e.target, e.product): e for e in known.entries}
    made: list[Entry] = []
    with _Bench(request, plan) as bench:
        jobs = sorted(bench.jobs(), key=lambda job: ((target, job.chosen.product) in entries, -job.seconds))
        try:
            for job in jobs:
                if time.monotonic() >= deadline:
                    break
                entry = bench.fastest(job, target, deadline, progress)
                if entry is not None:
                    made.append(entry)
                    entries[target, entry.product] = entry
                    tuning.save(request.out, entries.values(), known.cpu_entries)
        finally:
            progress.say(f"{len(made)} of {len(jobs)} products by bucket measured on {bench.gpu.name}")
    return tuple(made)


def _driver(plan: Plan) -> Driver:
    try:
        return Driver()
    except PlancError as e:
        raise PlancError(f"planc tune runs kernels on the GPU that a plan is for, here {plan.target}: {e}") from None


class _Bench:
    """The GPU that a plan is for, and a folder for kernels."""

    def __init__(self, request: TuneRequest, plan: Plan) -> None:
        self.request, self.plan = request, plan
        self.held: LaunchPlan = launches.load(request.plan)
        self.graph: Graph = text.read(request.plan / store.GRAPH)
        self.tiles = tiles_of(plan)
        self.types: Mapping[str, TensorType] = {**self.graph.types, **page_table(self.held.page_table_stride)}
        self.wide = aligned(self.graph)
        self._binaries: dict[str, Binary] = {}

    def __enter__(self) -> "_Bench":
        self.gpu = Gpu(_driver(self.plan), self.held.sm, self.plan.target, self.request.device or 0)
        try:
            self._check_gpu()
        except BaseException:
            self.gpu.close()
            raise
        self._folder = tempfile.TemporaryDirectory(prefix="planc-tune-")
        return self

    def __exit__(self, *error: object) -> None:
        self.gpu.close()
        self._folder.cleanup()

    def _check_gpu(self) -> None:
        """What another GPU of the same SM is seen to do says little of this one."""
        gpu, named = self.gpu, parse(self.plan.target).gpu
        what = gpu.api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        count = int(gpu.run("counting its SMs", "cuDeviceGetAttribute", what, gpu.device))
        if named is not None and count != named.sms:
            raise PlancError(
                f"the plan is for {named.name} with {named.sms} SMs, this GPU is {gpu.name} with {count}: what is "
                "measured here is not for it. Build a plan for this GPU, and tune that."
            )

    def jobs(self) -> Iterator[_Job]:
        """Every product of every bucket once."""
        found: dict[Product, _Job] = {}
        for step in self.held.graphs:
            bucket = Bucket(step.tokens, step.seqs, step.rows)
            for node in self.graph.nodes:
                if node.op in PRODUCTS:
                    chosen = next(c.choice for c in self._calls(node, bucket, self.tiles) if c.choice is not None)
                    job = found.setdefault(chosen.product, _Job(node, bucket, chosen))
                    job.seconds += chosen.cost.seconds
        yield from found.values()

    def fastest(self, job: _Job, target: str, deadline: float, progress: Progress) -> Entry | None:
        """The tile that won, or None when the time was over before any ran."""
        made = self._candidates(job, progress)
        if time.monotonic() >= deadline:
            return None
        subject = Subject(job.node, job.bucket, self.types, self.graph, _scratch(made), self.tiles.gpu.l2_mb * 1e6)
        took = race(self.gpu, subject, made, deadline)
        winner = min(range(len(made)), key=lambda n: took[n])
        progress.say(
            f"{job.chosen.product}: {made[winner].choice.tile}, {took[winner] * 1e6:.1f} us "
            f"(the plan's {took[0] * 1e6:.1f}, predicted {job.chosen.cost.seconds * 1e6:.1f})"
        )
        return Entry(target, job.chosen.product, made[winner].choice.tile, round(took[winner] * 1e6, 3), self.gpu.name)

    def _candidates(self, job: _Job, progress: Progress) -> list[Candidate]:
        """The plan's own tile, and those that should be the fastest, compiled; what the gate refuses is left out."""
        p = job.chosen.product
        ranked = sorted(self.tiles.ranked(p), key=lambda c: c.cost.work)
        near = [c for c in ranked[: self.request.best or _BEST] if c.cost.work <= _WITHIN * ranked[0].cost.work]
        choices = [job.chosen, *(c for c in near if c.tile != job.chosen.tile)]
        made = {c: self._calls(job.node, job.bucket, self.tiles.with_tile(p, c.tile)) for c in choices}
        try:
            self._compile([call for part in made.values() for call in part])
            return [self._candidate(c, part) for c, part in made.items()]
        except PlancError:
            return self._one_by_one(made, progress)

    def _one_by_one(self, made: Mapping[Choice, tuple[Call, ...]], progress: Progress) -> list[Candidate]:
        found = []
        for choice, part in made.items():
            try:
                self._compile(list(part))
            except PlancError as e:
                progress.say(f"{choice.tile} is left out: {e}")
            else:
                found.append(self._candidate(choice, part))
        if not found:
            raise PlancError(f"no tile of {next(iter(made)).product} compiles; build the plan again.")
        return found

    def _compile(self, made: list[Call]) -> None:
        folder = Path(self._folder.name)
        for binary in aot.compile([c.kernel for c in made], self.held.sm, folder):
            self._binaries[binary.name] = binary

    def _candidate(self, choice: Choice, made: tuple[Call, ...]) -> Candidate:
        names = [c.kernel.name for c in made]
        images = {n: (Path(self._folder.name) / f"{n}.cubin").read_bytes() for n in names}
        return Candidate(choice, made, {n: self._binaries[n] for n in names}, images)

    def _calls(self, node: Node, bucket: Bucket, tiles: Tiles) -> tuple[Call, ...]:
        return calls(node, self.types, self.held.sm, bucket, self.wide, tiles)


def _scratch(candidates: list[Candidate]) -> dict[str, int]:
    """Bytes of each scratch buffer that are enough for every tile."""
    sizes: dict[str, int] = {}
    for name, size in ((n, s) for c in candidates for call in c.calls for n, s in call.scratch.items()):
        sizes[name] = max(size, sizes.get(name, 0))
    return sizes
