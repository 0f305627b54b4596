"""The CUDA executor: a plan directory and a number of KV blocks go in, logits of packed steps come out.

It holds the plan's cubins, one CUDA graph a bucket, and the arenas in device memory. A step copies its batch in,
launches the graph of the smallest bucket that holds it, and copies out the logits, or the tokens that were chosen
where they are. It needs a driver and cuda.bindings. Of a plan of several ranks it is one, for cuda_ranks.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planc.errors import PlancError
from planc.plans import launches, ranks, sampling
from planc.plans.launches import KV, Binary, Buffer, Launch, LaunchPlan, StepGraph
from planc.plans.ranks import SHARED
from planc.plans.schema import Plan
from planc.runtime.batch import Batch, Int32
from planc.runtime.cpu import check_file, check_paths
from planc.runtime.cuda_driver import Driver, Gpu
from planc.runtime.cuda_inputs import StepInputs, staging_bytes
from planc.runtime.weights import MappedWeights, addresses

_PLAIN_SHARED = 48 << 10  # bytes of shared memory that a kernel gets without asking
_FLAGS = {
    "weights": "the model does not fit; build it for a larger GPU, a smaller --dtype or more ranks with --tp",
    KV: "lower --kv-cache-memory-bytes or --memory-utilization",
    "act": "build the plan with a smaller --max-num-batched-tokens",
    "io": "build the plan with a smaller --max-num-seqs",
    SHARED: "build the plan with a smaller --max-num-batched-tokens",
}
_WHAT = {
    "weights": "the weights",
    KV: "the KV cache",
    "act": "activations",
    "io": "the inputs of a step",
    SHARED: "what ranks share",
}


def arena_bytes(plan: LaunchPlan, kv_bytes: int) -> dict[str, int]:
    """Device memory that an executor takes, by arena, with a KV cache of so many bytes."""
    sizes = {name: plan.arenas.get(name, 0) for name in launches.ARENAS if name != SHARED or SHARED in plan.arenas}
    return sizes | {KV: kv_bytes}


def kv_memory(root: Path, plan: Plan, utilization: float, device: int = 0) -> int:
    """Bytes for the KV cache: a share of the GPU's memory, less what others hold and what the model itself takes.

    PlancError when there is no GPU, or the plan is for another one.
    """
    held = launches.load(root)
    with opened(held, plan.target, device) as gpu:
        free, total = gpu.memory()
    taken = sum(arena_bytes(held, 0).values())
    return int(total * utilization) - (total - free) - taken


@contextmanager
def opened(held: LaunchPlan, target: str, device: int = 0) -> Iterator[Gpu]:
    """The GPU that a plan is for, given back in the end."""
    gpu = Gpu(Driver(), held.sm, target, device)
    try:
        yield gpu
    finally:
        gpu.close()


def allocate(gpu: Gpu, plan: LaunchPlan, kv_bytes: int) -> Arenas:
    """The arenas of a plan on a GPU. PlancError says which one does not fit, what is free, and what to change."""
    arenas = Arenas(plan, sizes=arena_bytes(plan, kv_bytes))
    for name, nbytes in arenas.sizes.items():
        arenas.start[name] = gpu.allocate(max(nbytes, 1), _WHAT[name], _FLAGS[name])
    return arenas


@dataclass(frozen=True)
class _Graph:
    """A bucket that is ready to run, and the launch that each of its nodes is, None for a graph."""

    step: StepGraph
    exec: Any
    launches: tuple[Launch | None, ...]
    inputs: StepInputs


@dataclass
class Arenas:
    """Device memory by arena; a buffer of the plan, or an input of the graph it is `of`, is an address in one."""

    plan: LaunchPlan
    start: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    inputs: Mapping[str, Buffer] = field(default_factory=dict)

    def of(self, step: StepGraph) -> Arenas:
        """The same memory, as the launches of a graph name it."""
        return replace(self, inputs={b.name: b for b in step.inputs})

    def address(self, buffer: str) -> int:
        """Where a buffer begins."""
        found = self._found(buffer)
        return self.start[found.arena] + found.offset

    def _found(self, buffer: str) -> Buffer:
        return self.inputs.get(buffer) or self.plan.buffer[buffer]

    def span(self, buffer: str) -> tuple[int, int]:
        """The addresses from a buffer's first byte to the one behind its last."""
        found, start = self._found(buffer), self.address(buffer)
        return start, start + (self.sizes[KV] - found.offset if found.arena == KV else found.nbytes)


class CudaExecutor:
    """Runs a plan's graphs on one GPU. PlancError when it has no driver, another GPU or too little memory, or when a
    file is missing or corrupt.

    Of a plan of several ranks it runs `rank`, once `build` has made its graphs; the others must run at the same time,
    see cuda_ranks.
    """

    def __init__(self, root: Path, plan: Plan, num_blocks: int, device: int = 0, rank: int = 0) -> None:
        _check(root, plan)
        self.rank = rank
        self.num_blocks, self.block_size = num_blocks, plan.kv.block_size
        self.vocab_size = plan.limits.vocab_size
        self.plan = launches.load(root)
        self.samples = self.plan.samples
        self._root, self._manifest, self._where = root, plan, "a step"
        self._gpu: Gpu | None = Gpu(Driver(), self.plan.sm, plan.target, device)
        try:
            self._load(num_blocks * plan.kv.page_bytes)
        except BaseException:
            self.close()
            raise

    def _load(self, kv_bytes: int) -> None:
        gpu = self._opened()
        self.arenas = allocate(gpu, self.plan, kv_bytes)
        self._functions = {b.name: self._function(b) for b in self.plan.binaries}
        self.steps = sorted(self.plan.graphs, key=lambda g: (g.tokens, g.seqs, g.rows))
        self._staging = gpu.pinned(staging_bytes(self.steps))
        if SHARED not in self.plan.arenas:
            self.build({})
        self._sampled = gpu.pinned(self.plan.buffer[sampling.SAMPLED].nbytes if self.samples else 0).view(np.int32)
        rows = max((g.rows for g in self.plan.graphs), default=0)
        self._logits = gpu.pinned(rows * self.vocab_size * 4).view(np.float32).reshape(rows, self.vocab_size)
        self._copy_weights()

    def step(self, batch: Batch) -> NDArray[np.float32]:
        """Run one step; logits [R, vocab_size], overwritten by the next one."""
        self.launch(batch)
        self.finish()
        return self.logits(len(batch.logit_rows))

    def sample_step(
        self, batch: Batch, records: Int32, *, with_logits: bool = False
    ) -> tuple[Int32, NDArray[np.float32]]:
        """Run one step whose rows are chosen by `records` [R, RECORD]. Of each row its token and the bits of its best
        logit [R, 2], and logits [R, vocab_size]: those of rows whose record says HOST, or of all `with_logits`, in
        which penalties and biases have been applied.
        """
        self.launch(batch, records, with_logits)
        self.finish()
        return self.sampled(len(records)), self.logits(len(records))

    def launch(self, batch: Batch, records: Int32 | None = None, with_logits: bool = False) -> None:
        """Starts one step, as step or sample_step run it; after `finish`, `logits` and `sampled` have what it gave.

        Of several ranks only the first copies that out: all have the same.
        """
        gpu = self._opened()
        gpu.enter()
        graph = self.fitting(batch)
        self._where = where = f"the step of {graph.step.tokens} tokens and {graph.step.seqs} sequences"
        graph.inputs.fill(batch, records)
        gpu.copy_in(f"copying the inputs of {where}", self.arenas.start["io"] + graph.inputs.offset, graph.inputs.bytes)
        gpu.run(where, "cuGraphLaunch", graph.exec, gpu.stream)
        rows = len(batch.logit_rows)
        if self.rank:
            return
        if records is None or with_logits:
            self._copy_logits(where, 0, rows)
        else:
            for start, stop in _runs(records[:, sampling.KIND] == sampling.HOST):
                self._copy_logits(where, start, stop)
        if records is not None and rows:
            gpu.copy_out(where, self.sampled(rows), self.arenas.address(sampling.SAMPLED))

    def finish(self) -> None:
        """Waits for the step that was launched last."""
        gpu = self._opened()
        gpu.enter()
        gpu.synchronize(self._where)

    def _copy_logits(self, where: str, start: int, stop: int) -> None:
        """Enqueues a copy of some rows of logits to the host."""
        if start < stop:
            source = self.arenas.address(self.plan.logits) + start * self._logits.strides[0]
            self._opened().copy_out(where, self._logits[start:stop], source)

    def sampled(self, rows: int) -> Int32:
        """What the last step chose [rows, 2]: tokens, and the bits of the best logits."""
        return self._sampled.reshape(-1, 2)[:rows]

    def logits(self, rows: int) -> NDArray[np.float32]:
        """The logits of the last step, [rows, vocab_size]."""
        return self._logits[:rows]

    def share(self, acts: Sequence[int], shared: Sequence[int]) -> None:
        """Tells this rank where each rank's activations begin, and what it shares; before the first step of any."""
        gpu, target = self._opened(), self.arenas.start[SHARED]
        gpu.enter()
        head = ranks.table(self.rank, acts, shared).ljust(ranks.STAGING, b"\0")  # and nobody has met anybody yet
        gpu.run("telling ranks of each other", "cuMemcpyHtoD", target, head, len(head))

    def graphs(self) -> Mapping[int, tuple[Arenas, tuple[Launch | None, ...]]]:
        """Launches and the memory that they name, by the driver's handle of their graph, for tools that watch them."""
        return {int(graph.exec): (self.arenas.of(graph.step), graph.launches) for graph in self._graphs}

    @property
    def gpu(self) -> Gpu:
        """The GPU that it runs on."""
        return self._opened()

    def end_graphs(self) -> None:
        """Gives the graphs back, ahead of all else; no step follows."""
        if self._gpu is not None:
            self._gpu.close("cuGraph")

    def close(self) -> None:
        """Give everything on the GPU back."""
        if self._gpu is not None:
            self._gpu.close()
            self._gpu = None

    def _opened(self) -> Gpu:
        if self._gpu is None:
            raise PlancError("the executor is closed; open the plan again to run more steps")
        return self._gpu

    # --- loading

    def _function(self, binary: Binary) -> Any:
        """A kernel, from its cubin."""
        check_file(self._root, self._manifest, binary.cubin)
        path, gpu = self._root / binary.cubin, self._opened()
        try:
            image = path.read_bytes()
        except OSError as e:
            raise PlancError(f"{path} cannot be read ({e.strerror}). Build the plan again.") from None
        return load_function(gpu, binary, image)

    def build(self, instead: Mapping[tuple[int, int], Sequence[Any]]) -> None:
        """Makes the graphs; `instead` has what takes the place of a launch of a step: graphs and other launches."""
        self._opened().enter()
        self._graphs = [
            self._graph(step, {n: parts for (s, n), parts in instead.items() if s == number})
            for number, step in enumerate(self.steps)
        ]

    def _graph(self, step: StepGraph, instead: Mapping[int, Sequence[Any]]) -> _Graph:
        """A CUDA graph with a kernel node for each launch, and an edge for each dependency."""
        gpu, where = self._opened(), f"the graph of {step.tokens} tokens and {step.seqs} sequences"
        ends: list[Any] = []  # by launch, the node that others wait for
        made: list[Launch | None] = []
        handle, arenas = gpu.graph(), self.arenas.of(step)
        for number, launch in enumerate(step.launches):
            before = [ends[d] for d in launch.deps]
            for part in instead.get(number, (launch,)):
                before = [self._node(handle, part, before, arenas, where)]
                made.append(part if isinstance(part, Launch) else None)
            ends += before
        inputs = StepInputs(self.plan, step, self._staging)
        return _Graph(step, gpu.instantiate(where, handle), tuple(made), inputs)

    def _node(self, graph: Any, part: Any, before: Sequence[Any], arenas: Arenas, where: str) -> Any:
        """A launch, or a graph, behind other nodes."""
        gpu = self._opened()
        if not isinstance(part, Launch):
            return gpu.run(f"adding a graph to {where}", "cuGraphAddChildGraphNode", graph, before, len(before), part)
        with kernel_node(gpu.api, self.plan.binary[part.kernel], part, arenas) as params:
            params.func = self._functions[part.kernel]
            doing = f"adding kernel {part.kernel} to {where}"
            return gpu.run(doing, "cuGraphAddKernelNode", graph, before, len(before), params)

    def _copy_weights(self) -> None:
        gpu, files = self._opened(), [MappedWeights(self._root / n) for n in self._manifest.weight_files_of(self.rank)]
        buffers = [b for b in self.plan.buffers if b.arena == "weights"]
        for buffer, source in zip(buffers, addresses(files, [b.name for b in buffers]), strict=True):
            has = next(f.nbytes(buffer.name) for f in files if buffer.name in f)
            if has != buffer.nbytes:
                raise PlancError(
                    f"weight {buffer.name!r} has {has} bytes in the plan's weights, {buffer.nbytes} in its launches. "
                    "Build the plan again."
                )
            target = self.arenas.address(buffer.name)
            gpu.run(f"copying weight {buffer.name}", "cuMemcpyHtoDAsync", target, source, has, gpu.stream)
        gpu.synchronize("copying the weights")
        for file in files:
            file.release()

    # --- a step

    def fitting(self, batch: Batch) -> _Graph:
        """The smallest bucket that holds a batch. PlancError when none does."""
        columns, stride = batch.page_table.shape[1], self.plan.page_table_stride
        if columns > stride:
            raise PlancError(f"the page table has {columns} columns, the plan holds {stride}")
        need = len(batch.ids), len(batch.page_table), len(batch.logit_rows)
        for graph in self._graphs:
            if graph.step.tokens >= need[0] and graph.step.seqs >= need[1] and graph.step.rows >= need[2]:
                return graph
        raise PlancError(
            f"a step of {need[0]} tokens of {need[1]} sequences with {need[2]} rows of logits fits no graph of the "
            "plan; lower --max-num-batched-tokens or --max-num-seqs to what planc inspect shows"
        )


def _runs(wanted: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Where neighbours that are wanted begin and end."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], wanted, [False]])))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


def load_function(gpu: Gpu, binary: Binary, image: bytes) -> Any:
    """A kernel of a cubin, with the shared memory that it needs."""
    function = gpu.function(f"loading kernel {binary.name}", image, binary.entry)
    if binary.shared > _PLAIN_SHARED:
        attribute = gpu.api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        doing = f"giving kernel {binary.name} {binary.shared} bytes of shared memory"
        gpu.run(doing, "cuFuncSetAttribute", function, attribute, binary.shared)
    return function


@contextmanager
def kernel_node(api: Any, binary: Binary, launch: Launch, arenas: Arenas) -> Iterator[Any]:
    """A kernel node's parameters. The driver copies them when the node is made, so they live no longer than that.

    Each argument goes by its own pointer: where it lies in the kernel's parameter memory is the driver's matter.
    """
    values = [launches.pack(a, arenas.address(str(a.value)) if a.kind == "buffer" else 0) for a in launch.args]
    values += [bytes(size) for _, size in binary.params[len(values) :]]
    places = [ctypes.create_string_buffer(v, len(v)) for v in values]
    pointers = (ctypes.c_void_p * len(places))(*[ctypes.addressof(p) for p in places])
    params = api.CUDA_KERNEL_NODE_PARAMS()
    params.gridDimX, params.gridDimY, params.gridDimZ = launch.grid
    params.blockDimX, params.blockDimY, params.blockDimZ = binary.threads, 1, 1
    params.sharedMemBytes = binary.shared
    params.kernelParams = ctypes.addressof(pointers)
    yield params
    del pointers, places  # kept alive until here


def _check(root: Path, plan: Plan) -> None:
    if not plan.is_cuda:
        raise PlancError(f"the plan is for {plan.target}; the CUDA executor runs plans for cuda targets")
    check_paths(root, plan)
    if not plan.has_weights:
        raise PlancError(f"{root} was built with --weights none; `planc pack` adds the weights.")
    check_file(root, plan, launches.LAUNCHES)
