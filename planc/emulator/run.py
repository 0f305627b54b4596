"""Runs a CUDA plan without a GPU: in go a plan directory and batches, out come the logits that its PTX computes.

The executor and cuda.bindings are the real ones; the driver below them is the stand-in. By each pointer a launch may
touch the buffer that it is of and no other, graphs run in random orders that their edges allow, and launches that no
edge orders must not touch each other's bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planc.codegen.skus import SMS
from planc.emulator import driver, ptx
from planc.emulator.compile import Program
from planc.emulator.device import Device, Pointer, Reach, State, Statistics
from planc.emulator.machine import Grid, run
from planc.emulator.memory import Memory
from planc.emulator.ranks import EmulatedRanks
from planc.errors import PlancError
from planc.plans import launches
from planc.plans.launches import LaunchPlan
from planc.plans.ranks import SHARED
from planc.plans.schema import Plan
from planc.runtime.batch import Batch
from planc.runtime.cuda import Arenas, CudaExecutor, allocate, opened
from planc.runtime.cuda_ranks import CudaRanks

_MEMORY = 80 << 30  # of a device whose own size does not matter; only what is used takes host memory
EMULATED = (80, 86, 89, 90, 100, 120, 121)  # compute capabilities whose PTX the emulator runs


def device_of(sm: int, memory: int = _MEMORY, name: str | None = None) -> Device:
    """A device of a compute capability (90). PlancError when its PTX is not emulated."""
    if sm not in EMULATED:
        raise PlancError(f"the PTX of sm_{sm} is not emulated; emulated are {', '.join(f'sm_{n}' for n in EMULATED)}")
    return Device(name or f"an emulated sm_{sm}", sm, memory, SMS[sm].shared_block)


@dataclass(frozen=True)
class Emulated:
    """A plan's executor on an emulated GPU; of several ranks, all of them as one, and the GPU of the first.

    `statistics` counts launches, `used` is the device memory in use.
    """

    executor: CudaExecutor | EmulatedRanks
    state: State

    @property
    def statistics(self) -> Statistics:
        """Launches and seconds by kernel."""
        return self.state.statistics

    @property
    def used(self) -> int:
        """Bytes of device memory that are allocated."""
        return self.state.memory.used


@contextmanager
def emulated(
    root: Path, plan: Plan, num_blocks: int, *, device: Device | None = None, seed: int = 0, check_order: bool = True
) -> Iterator[Emulated]:
    """The plan's executor with `num_blocks` pages on an emulated GPU, by default one that fits the plan.

    A wrong access, launch or order raises PlancError from the executor's step, naming kernel, thread and instruction.
    """
    held = launches.load(root)
    texts, gpu, ranks = texts_of(root, held), device or device_of(held.sm), plan.limits.ranks
    states = [State(gpu, texts, seed + rank, check_order) for rank in range(ranks)]
    with driver.active(*states):
        executor = CudaRanks(root, plan, num_blocks) if ranks > 1 else CudaExecutor(root, plan, num_blocks)
        with closing(executor):
            of_ranks = executor.executors if isinstance(executor, CudaRanks) else [executor]
            for state, one in zip(states, of_ranks, strict=True):
                reached = [e for s, e in zip(states, of_ranks, strict=True) if s.memory in state.memory.peers]
                _watch(state, one, reached)
            whole = EmulatedRanks(executor, states) if isinstance(executor, CudaRanks) else executor
            yield Emulated(whole, states[0])


def allocated(root: Path, plan: Plan, num_blocks: int, device: Device | None = None) -> int:
    """Device memory in bytes that an executor of a plan takes, by the driver's account; weights need not be there.

    PlancError when the device, by default one of 80 GiB, is too small.
    """
    held = launches.load(root)
    state = State(device or device_of(held.sm), {}, 0)
    with driver.active(state), opened(held, plan.target) as gpu:
        allocate(gpu, held, num_blocks * plan.kv.page_bytes)
        return state.memory.used


def run_emulated(
    root: Path, plan: Plan, batches: Iterable[Batch], num_blocks: int, **options: Any
) -> list[NDArray[Any]]:
    """The logits of each batch, one after the other, as `emulated` runs them."""
    with emulated(root, plan, num_blocks, **options) as device:
        return [device.executor.step(batch).copy() for batch in batches]


def texts_of(root: Path, held: LaunchPlan) -> dict[str, str]:
    """PTX by the sha256 of its cubin."""
    texts = {}
    for binary in held.binaries:
        try:
            image, text = (root / binary.cubin).read_bytes(), (root / binary.ptx).read_text()
        except OSError as e:
            raise PlancError(f"{e.filename} cannot be read ({e.strerror}); emulation needs each kernel's PTX") from None
        texts[hashlib.sha256(image).hexdigest()] = text
    return texts


def _watch(state: State, executor: CudaExecutor, others: Sequence[CudaExecutor]) -> None:
    """Tells the GPU what each launch may touch, and what no launch writes."""
    graphs = executor.graphs().items()
    state.reach = {handle: [_reach(executor, held, x, others) for x in step] for handle, (held, step) in graphs}
    state.unwatched = (executor.arenas.start["weights"],)


def _reach(
    executor: CudaExecutor, arenas: Arenas, launch: launches.Launch | None, others: Sequence[CudaExecutor]
) -> Reach:
    """The buffers of a launch's arguments; of inputs what its graph has of them. A collective finds where its peers'
    begin in what ranks share, and reaches the same buffers there.
    """
    if launch is None:  # of a library, whose kernels are not seen
        return Reach()
    names = {n: str(a.value) for n, a in enumerate(launch.args) if a.kind == "buffer"}
    own = [Pointer(n, *arenas.span(name), f"buffer {name}") for n, name in names.items()]
    if SHARED not in names.values():
        return Reach(own)
    theirs = [
        Pointer(-1 if name == SHARED else n, *other.arenas.span(name), f"buffer {name} of rank {other.rank}")
        for other in (executor, *others)
        for n, name in names.items()
        if other is not executor or name == SHARED
    ]
    return Reach(own, theirs)


@lru_cache(maxsize=256)
def program(text: str) -> Program:
    """The only kernel of a PTX text, ready to run; made once for each text."""
    (kernel,) = ptx.parse(text).values()
    return Program(kernel)


def run_kernel(
    text: str,
    grid: tuple[int, int, int],
    args: Sequence[NDArray[Any] | bytes | int | float],
    shared: int,
    threads: int = 0,
) -> None:
    """Runs one kernel of PTX on arrays of the host, in place. KernelFault on a wrong access.

    An array is passed by address, in memory of its own; a number or bytes by value. Missing last parameters are zeros.
    """
    found = program(text)
    memory = Memory(_MEMORY)
    buffer = bytearray(found.kernel.param_bytes)
    held: Mapping[int, tuple[int, NDArray[Any]]] = {
        n: (memory.put(a), a) for n, a in enumerate(args) if isinstance(a, np.ndarray)
    }
    for n, (param, arg) in enumerate(zip(found.kernel.params, args, strict=False)):
        if isinstance(arg, np.ndarray):
            data = struct.pack("<Q", held[n][0])
        elif isinstance(arg, bytes):
            data = arg
        elif isinstance(arg, float):
            data = struct.pack("<f", arg)
        else:
            data = int(arg).to_bytes(param.size, "little", signed=True)
        if len(data) != param.size:
            raise ValueError(f"argument {n} has {len(data)} bytes, the kernel takes {param.size}")
        buffer[param.offset : param.offset + param.size] = data
    run(found, Grid(grid, threads or found.kernel.threads or 0, shared), bytes(buffer), memory)
    for address, array in held.values():
        array[...] = memory.get(address, array.shape, array.dtype)
