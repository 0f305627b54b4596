"""Candidates side by side on a GPU: in go launches of one product cut in several ways, out come the seconds of each.

A candidate's launches are repeated in one CUDA graph, each repetition on another copy of the weights, so that L2 does
not hold them as it would not in a step. The graphs run in turn, between events, and the median counts.
"""

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from planc.codegen.cuda.call import Bucket, Call, Ref
from planc.codegen.cuda.tiles import Choice
from planc.compiler.ir.graph import Graph, Node
from planc.compiler.ir.types import TensorType
from planc.plans.launches import Arg, Binary, Buffer, Launch, LaunchPlan
from planc.runtime.cuda import Arenas, kernel_node, load_function
from planc.runtime.cuda_driver import Gpu

_ROUNDS = 7  # of which the median counts
_LONG = 1e-3  # seconds of a graph: what events cost is nothing beside it
_REPEATS = 128
_COPIES = 32  # of the weights
_FILL = 0x3C  # every byte: small numbers in each dtype
_ALIGN = 256


@dataclass(frozen=True)
class Candidate:
    """A tile, the launches that run the product in it, and their kernels by name."""

    choice: Choice
    calls: tuple[Call, ...]
    binaries: Mapping[str, Binary]
    images: Mapping[str, bytes]


@dataclass(frozen=True)
class Subject:
    """A node in a bucket, the types of the values around it, bytes of scratch buffers, and bytes of the GPU's L2."""

    node: Node
    bucket: Bucket
    types: Mapping[str, TensorType]
    graph: Graph
    scratch: Mapping[str, int]
    l2: float

    @property
    def weights(self) -> dict[str, int]:
        """Bytes of what a step reads once."""
        return {n: self.types[n].nbytes() for n in self.node.inputs if n in self.graph.weight_by_name}

    @property
    def others(self) -> dict[str, int]:
        """Bytes of the values of a step, and of scratch buffers."""
        values = [n for n in self.node.inputs if n not in self.graph.weight_by_name] + [self.node.out.name]
        return {n: self.types[n].extent(self.bucket.dims) for n in values} | dict(self.scratch)

    @property
    def copies(self) -> int:
        """Copies of the weights that L2 does not hold together."""
        return max(1, min(_COPIES, math.ceil(2 * self.l2 / max(1, sum(self.weights.values())))))


def race(gpu: Gpu, subject: Subject, candidates: Sequence[Candidate], deadline: float) -> list[float]:
    """Median seconds of each candidate; once each has run, the deadline ends it."""
    with _memory(gpu, subject, candidates) as arenas, _events(gpu) as events:
        functions = {n: load_function(gpu, b, c.images[n]) for c in candidates for n, b in c.binaries.items()}
        once = [_Lap(gpu, arenas, c, functions, 1, 1) for c in candidates]
        first = min(lap.run(events) for _ in range(2) for lap in once)
        repeats = max(1, min(_REPEATS, int(_LONG / max(first, 1e-6))))
        laps = once if repeats == 1 else [_Lap(gpu, arenas, c, functions, repeats, subject.copies) for c in candidates]
        took: list[list[float]] = [[] for _ in laps]
        for _ in range(_ROUNDS):
            if took[0] and time.monotonic() >= deadline:
                break
            for lap, seconds in zip(laps, took, strict=True):
                seconds.append(lap.run(events))
    return [statistics.median(seconds) for seconds in took]


@dataclass
class _Lap:
    """A graph of a candidate's launches, `repeats` times one behind the other, on `copies` of the weights in turn."""

    gpu: Gpu
    arenas: Arenas
    candidate: Candidate
    functions: Mapping[str, Any]
    repeats: int
    copies: int
    _exec: Any = field(init=False)

    def __post_init__(self) -> None:
        graph, before = self.gpu.graph(), list[Any]()
        for number in range(self.repeats):
            for call in self.candidate.calls:
                args = tuple(self._argument(ref, number % self.copies) for ref in call.args)
                launch = Launch(call.kernel.name, call.grid, args, ())
                with kernel_node(self.gpu.api, self.candidate.binaries[launch.kernel], launch, self.arenas) as node:
                    node.func = self.functions[launch.kernel]
                    doing = f"adding kernel {launch.kernel}"
                    before = [self.gpu.run(doing, "cuGraphAddKernelNode", graph, before, len(before), node)]
        self._exec = self.gpu.instantiate("a graph of one product", graph)

    def _argument(self, ref: Ref, copy: int) -> Arg:
        if ref.kind not in ("value", "scratch"):
            return Arg(ref.kind, ref.value)
        name = f"{ref.value}#{copy}"
        return Arg("buffer", name if name in self.arenas.plan.buffer else str(ref.value), ref.offset)

    def run(self, events: tuple[Any, Any]) -> float:
        """Seconds of one repetition."""
        gpu, doing = self.gpu, f"running {self.candidate.choice.product} in tiles of {self.candidate.choice.tile}"
        gpu.run(doing, "cuEventRecord", events[0], gpu.stream)
        gpu.run(doing, "cuGraphLaunch", self._exec, gpu.stream)
        gpu.run(doing, "cuEventRecord", events[1], gpu.stream)
        gpu.synchronize(doing)
        return float(gpu.run(doing, "cuEventElapsedTime", *events)) / 1e3 / self.repeats


@contextmanager
def _events(gpu: Gpu) -> Iterator[tuple[Any, Any]]:
    made = tuple(gpu.run("making an event", "cuEventCreate", 0) for _ in range(2))
    try:
        yield made[0], made[1]
    finally:
        for event in made:
            gpu.api.cuEventDestroy(event)


@contextmanager
def _memory(gpu: Gpu, subject: Subject, candidates: Sequence[Candidate]) -> Iterator[Arenas]:
    """The product's buffers in device memory, given back in the end."""
    copies = {f"{n}#{i}": size for i in range(subject.copies) for n, size in subject.weights.items()}
    buffers, end = [], 0
    for name, size in {**subject.others, **copies}.items():
        buffers.append(Buffer(name, "act", end, size))
        end += -(-size // _ALIGN) * _ALIGN
    binaries = tuple({n: b for c in candidates for n, b in c.binaries.items()}.values())
    plan = LaunchPlan(0, binaries, tuple(buffers), {"act": end}, (), "", 0)
    doing = f"allocating {end} bytes for {candidates[0].choice.product}"
    start = gpu.run(doing, "cuMemAlloc", end)
    try:
        gpu.run("filling memory", "cuMemsetD8Async", start, _FILL, end, gpu.stream)
        arenas = Arenas(plan, {"act": int(start)}, {"act": end})
        _choose_experts(gpu, subject, arenas, candidates[0].choice.product.experts)
        yield arenas
    finally:
        gpu.synchronize("measuring")
        gpu.run("giving memory back", "cuMemFree", start)


def _choose_experts(gpu: Gpu, subject: Subject, arenas: Arenas, experts: int) -> None:
    """Numbers of experts, each as often as any other."""
    for name in subject.node.inputs if experts else ():
        if subject.types[name].dtype == "i32":
            count = subject.others[name] // 4
            ids = (np.arange(count, dtype=np.int64) * 7919 % experts).astype(np.int32)
            source = int(ids.ctypes.data)
            gpu.run("copying experts", "cuMemcpyHtoDAsync", arenas.address(name), source, ids.nbytes, gpu.stream)
            gpu.synchronize("copying experts")
