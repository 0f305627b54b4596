"""`planc tune` on a CPU: in goes a plan for it, out comes tuning.json with the fastest blocking of each product here.

Of each product a kernel for every value of every choice is compiled and run beside the defaults, then one with the best
of each choice together. What is not clearly faster, or has other bits, is not taken.
"""

import ctypes
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from planc.codegen.cpu import build_library
from planc.codegen.cpu_blocking import constants, product_of, variants
from planc.codegen.kernel import Kernel, arguments, choose
from planc.codegen.render import kernel_source, render
from planc.codegen.target import parse
from planc.codegen.work import Step, work
from planc.compiler.ir import text
from planc.compiler.ir.graph import Graph, Node
from planc.compiler.ir.types import TensorType
from planc.compiler.progress import Progress
from planc.compiler.tune_cpu_measure import Subject, race
from planc.compiler.tune_request import TuneRequest
from planc.errors import PlancError
from planc.plans import store, tuning
from planc.plans.host import available_bytes, cpu_name, missing_flags, usable_cores
from planc.plans.schema import Plan
from planc.plans.tuning import Blocking, CpuEntry, CpuProduct, Tuning

_CLEARLY = 0.97  # of the defaults' time: what is nearer may be noise
_PERHAPS = 0.99  # of one choice alone: worth to be tried with the best of the others
_DECODE, _PREFILL = (8, 32), 512  # rows; of a single one, every blocking does the same
_ONE = Step(1, 1, 1, 1)


class _Over(Exception):
    """The seconds are over."""


@dataclass
class _Job:
    """A product, a node that computes it, and the bytes that a step of one token moves for all such nodes."""

    product: CpuProduct
    node: Node
    types: Sequence[TensorType]
    moved: float = field(default=0.0)


def tune_cpu(
    request: TuneRequest, plan: Plan, known: Tuning, deadline: float, progress: Progress
) -> tuple[CpuEntry, ...]:
    """Measures until all products are done or the deadline is over. PlancError when this CPU does not run the plan."""
    missing = missing_flags(plan.target)
    if missing:
        raise PlancError(
            f"{request.plan} is for {plan.target}, and this CPU lacks {', '.join(missing)}: what is measured here is "
            "not for it. Run planc tune on a CPU of that target."
        )
    entries = {(e.target, e.product): e for e in known.cpu_entries}
    made: list[CpuEntry] = []
    jobs = _jobs(text.read(request.plan / store.GRAPH))
    jobs.sort(key=lambda job: ((plan.target, job.product) in entries, -job.moved))
    threads = request.threads or usable_cores()
    with tempfile.TemporaryDirectory(prefix="planc-tune-") as folder:
        bench = _Bench(plan, threads, Path(folder), deadline, progress)
        try:
            for job in jobs:
                entry = bench.fastest(job)
                if entry is not None:
                    made.append(entry)
                    entries[entry.target, entry.product] = entry
                    tuning.save(request.out, known.entries, entries.values())
        except _Over:
            pass  # what is compiled is in the cache: another run goes on from there
        finally:
            progress.say(f"{len(made)} of {len(jobs)} products measured on {threads} threads of {cpu_name()}")
    return tuple(made)


def _jobs(graph: Graph) -> list[_Job]:
    """Every product once."""
    found: dict[CpuProduct, _Job] = {}
    for node in graph.nodes:
        types = [graph.types[i] for i in node.inputs]
        product = product_of(node, types)
        if product is not None:
            job = found.setdefault(product, _Job(product, node, types))
            job.moved += work(node, graph.types, _ONE).nbytes
    return list(found.values())


@dataclass(frozen=True)
class _Bench:
    """This CPU, and a folder for libraries."""

    plan: Plan
    threads: int
    folder: Path
    deadline: float
    progress: Progress

    def fastest(self, job: _Job) -> CpuEntry | None:
        """What won; None when its weights are too many. _Over when the time is, before it was clear."""
        subject = Subject(job.node, job.types, self._rows(job.node), self.threads)
        if subject.nbytes > available_bytes() / 2:
            self.progress.say(f"{job.product} is left out: its weights take more than half of the free memory")
            return None
        alone = self._ratios(job, subject, variants(job.product))
        finals = dict.fromkeys((Blocking(), *best_of(alone)))
        ratios = self._ratios(job, subject, tuple(finals)) if len(finals) > 1 else {Blocking(): 1.0}
        winner = min(ratios, key=lambda blocking: ratios[blocking])
        if ratios[winner] > _CLEARLY:
            winner = Blocking()
        gain = f", {ratios[winner]:.1%} of the time of the defaults" if winner.given else ""
        self.progress.say(f"{job.product}: {winner}{gain}")
        return CpuEntry(self.plan.target, job.product, winner, round(ratios[winner], 4), self.threads, cpu_name())

    def _rows(self, node: Node) -> tuple[int, ...]:
        """Sizes of steps to measure: decode, and prefill where the node sees all tokens."""
        limits = self.plan.limits
        decode = [n for n in _DECODE if n <= limits.max_num_seqs] or [limits.max_num_seqs]
        prefill = [min(_PREFILL, limits.max_num_batched_tokens)] if node.out.type.shape[0] == "T" else []
        return tuple(dict.fromkeys([*decode, *prefill]))

    def _ratios(self, job: _Job, subject: Subject, blockings: Sequence[Blocking]) -> dict[Blocking, float]:
        """The mean time of each over that of the first; those that have other bits than it are left out."""
        library = self._library(job, blockings)
        found = race(library, subject, len(blockings), self.deadline)
        if found is None:
            raise _Over
        for blocking, ratio in zip(blockings, found, strict=True):
            if ratio is None:
                self.progress.say(f"{job.product}: {blocking} is left out: its results have other bits")
        return {blocking: ratio for blocking, ratio in zip(blockings, found, strict=True) if ratio is not None}

    def _library(self, job: _Job, blockings: Sequence[Blocking]) -> ctypes.CDLL:
        """The product's kernels in so many blockings, in a library that runs them by number."""
        self._check_time()
        target = parse(self.plan.target)
        kernels = [choose(job.node, job.types, target, constants(blocking)) for blocking in blockings]
        buffers = len(arguments(job.node, job.types, target))
        folder = Path(tempfile.mkdtemp(dir=self.folder))  # a path that was loaded once is not loaded again
        sources = _sources(kernels, buffers)
        return ctypes.CDLL(str(build_library(sources, target, folder, progress=self._check_time)))

    def _check_time(self, *compiled: object) -> None:
        if time.monotonic() >= self.deadline:
            raise _Over


def _sources(kernels: Sequence[Kernel], buffers: int) -> dict[str, str]:
    names = [k.name for k in kernels]
    race_source = render("race.cpp.jinja", {"kernels": names, "num_buffers": buffers})
    return {f"{k.name}.cpp": kernel_source(k) for k in kernels} | {"race.cpp": race_source}


def best_of(alone: Mapping[Blocking, float]) -> Iterator[Blocking]:
    """The two fastest, and the best of every choice together, as far as they seem to gain anything."""
    gains = sorted((b for b, ratio in alone.items() if ratio <= _PERHAPS), key=lambda b: alone[b])
    together = Blocking()
    for blocking in reversed(gains):  # the best comes last, and stays
        together = replace(together, **blocking.given)
    if gains:
        yield from gains[:2]
        yield together
