"""What a plan's ranks do together, all of them on one GPU: in goes a plan, out come a JSON row a kernel and message.

Each rank is a stream with memory of its own, so that the kernels, their flags and their waits are seen on a GPU where
there is no second one. The bits are compared with the reference's; times say what meeting costs, not what links carry.

    planc build --model M --tp 2 --target h200 --weights none -o plan && python -m benchmarks.gpu_ranks plan
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import median, row
from planc.compiler.emulate_ranks import reference
from planc.plans import launches, ranks, store
from planc.plans.launches import Arg, Binary, Buffer, Launch, LaunchPlan
from planc.plans.ranks import SHARED
from planc.plans.schema import Plan
from planc.runtime.cuda import Arenas, kernel_node, load_function, opened
from planc.runtime.cuda_driver import Gpu

REPEATS = 50  # of a message in one graph
STREAMS = 8  # that a GPU runs at once, unless CUDA_DEVICE_MAX_CONNECTIONS says otherwise
SMALL = 5000  # elements at most on an emulated GPU


def check(root: Path, plan: Plan, runs: int, emulated: bool = False) -> bool:
    """Whether every kernel gives all ranks the reference's bits, for the smallest and the largest of its messages."""
    held, count = launches.load(root), plan.limits.ranks
    if count > STREAMS:
        row(benchmark="gpu_ranks", skipped=f"{count} ranks, more than the {STREAMS} streams that a GPU runs at once")
        return True
    good = True
    with _emulated(root, held) if emulated else nullcontext(), opened(held, plan.target) as gpu:
        for name, sizes in _messages(held).items():
            for n in sorted({min(n, SMALL) if emulated else n for n in sizes}):
                ok, seconds = _run(gpu, root, held.binary[name], count, n, runs, 2 if emulated else REPEATS)
                row(
                    benchmark="gpu_ranks",
                    kernel=held.binary[name].entry,
                    ranks=count,
                    elements=n,
                    ok=ok,
                    us=seconds * 1e6,
                )
                good &= ok
    return good


def _messages(held: LaunchPlan) -> dict[str, tuple[int, int]]:
    """The fewest and the most elements of each kernel of collectives."""
    found: dict[str, list[int]] = {}
    for launch in (x for graph in held.graphs for x in graph.launches):
        if any(a.value == SHARED for a in launch.args):
            found.setdefault(launch.kernel, []).append(int(launch.args[2].value))
    return {name: (min(sizes), max(sizes)) for name, sizes in found.items()}


def _run(gpu: Gpu, root: Path, binary: Binary, count: int, n: int, runs: int, repeats: int) -> tuple[bool, float]:
    """Whether the bits are right, and the median seconds of a message."""
    op = "all_gather" if binary.entry == "all_gather" else "all_reduce"
    to, out = -(-4 * n // 256) * 256, n * (count if op == "all_gather" else 1)
    buffers = (
        Buffer("x", "act", 0, 4 * n),
        Buffer("y", "act", to, 4 * out),
        Buffer(SHARED, SHARED, 0, ranks.nbytes(count)),
    )
    sizes = {"act": to + 4 * out, SHARED: ranks.nbytes(count)}
    of = LaunchPlan(0, (binary,), buffers, sizes, (), "y", 0)
    args = (*(Arg("buffer", b) for b in ("x", "y")), Arg("i64", n), Arg("buffer", SHARED))
    with _memory(gpu, of, count) as places, _streams(gpu, count) as streams:
        graphs = [_graph(gpu, root, Launch(binary.name, (ranks.blocks(n), 1, 1), args, ()), a, repeats) for a in places]
        rng, seconds, ok = np.random.default_rng(0), list[float](), True
        for _ in range(runs):
            parts = [rng.standard_normal(n).astype(np.float32) for _ in range(count)]
            for place, part in zip(places, parts, strict=True):
                gpu.run("sending a part", "cuMemcpyHtoD", place.address("x"), part.tobytes(), part.nbytes)
            start = time.perf_counter()
            for graph, stream in zip(graphs, streams, strict=True):
                gpu.run("the ranks' graphs", "cuGraphLaunch", graph, stream)
            for stream in streams:
                gpu.run("the ranks' graphs", "cuStreamSynchronize", stream)
            seconds.append((time.perf_counter() - start) / repeats)
            wanted = reference(op, parts)
            for place in places:
                got = np.empty(out, np.float32)
                gpu.run("reading a result", "cuMemcpyDtoH", int(got.ctypes.data), place.address("y"), got.nbytes)
                ok &= got.tobytes() == wanted.tobytes()
    return ok, median(seconds)


@contextmanager
def _memory(gpu: Gpu, plan: LaunchPlan, count: int) -> Iterator[list[Arenas]]:
    """The arenas of all ranks, each told of the others."""
    start = [{name: gpu.allocate(size, f"rank {r}", "") for name, size in plan.arenas.items()} for r in range(count)]
    for r, own in enumerate(start):
        head = ranks.table(r, [s["act"] for s in start], [s[SHARED] for s in start]).ljust(ranks.STAGING, b"\0")
        gpu.run("telling ranks of each other", "cuMemcpyHtoD", own[SHARED], head, len(head))
    try:
        yield [Arenas(plan, s, dict(plan.arenas)) for s in start]
    finally:
        gpu.close("cuGraph")
        gpu.close("cuMemFree")


@contextmanager
def _streams(gpu: Gpu, count: int) -> Iterator[list[Any]]:
    streams = [gpu.run("making a stream", "cuStreamCreate", 1) for _ in range(count)]
    try:
        yield streams
    finally:
        for stream in streams:
            gpu.run("ending a stream", "cuStreamDestroy", stream)


def _graph(gpu: Gpu, root: Path, launch: Launch, arenas: Arenas, repeats: int) -> Any:
    """A launch, again and again."""
    binary = arenas.plan.binary[launch.kernel]
    function, handle, before = load_function(gpu, binary, (root / binary.cubin).read_bytes()), gpu.graph(), list[Any]()
    for _ in range(repeats):
        with kernel_node(gpu.api, binary, launch, arenas) as params:
            params.func = function
            before = [gpu.run("adding a kernel", "cuGraphAddKernelNode", handle, before, len(before), params)]
    return gpu.instantiate("the ranks' graphs", handle)


@contextmanager
def _emulated(root: Path, held: LaunchPlan) -> Iterator[None]:
    """One emulated GPU, to try this."""
    from planc.emulator import driver
    from planc.emulator.device import State
    from planc.emulator.run import device_of, texts_of

    device = replace(device_of(held.sm), memory=1 << 30)
    with driver.active(State(device, texts_of(root, held), 0, check_order=False)):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--emulated", action="store_true", help="on the emulator: to try this script")
    args = parser.parse_args()
    raise SystemExit(0 if check(args.plan, store.load(args.plan), args.runs, args.emulated) else 1)


if __name__ == "__main__":
    main()
