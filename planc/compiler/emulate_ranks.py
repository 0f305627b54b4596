"""Collectives of a CUDA plan by themselves: in goes a plan, out comes whether all ranks get the reference's bits.

Each kernel is run on as many emulated GPUs as the plan has ranks, several times over, in random orders, and sends no
more than it takes to fill its grid, so that it does not matter how large the model is.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from planc.codegen.skus import SMS
from planc.compiler.emulate import Verdict
from planc.compiler.ir.ops import OPS
from planc.compiler.ir.refs import Attrs
from planc.compiler.ir.types import TensorType
from planc.plans.launches import Binary, Launch, LaunchPlan
from planc.plans.ranks import SHARED

TIMES = 3  # that each is run: what one run has sent must not be what the next one sees
_MEMORY = 1 << 30  # of a GPU
_MOST = 140_000  # elements of a part, more than one shot is for


def check(root: Path, held: LaunchPlan, count: int, seed: int) -> Iterator[Verdict]:
    """Every kernel of collectives of a plan of `count` ranks, as the first launch that it is in."""
    from planc.emulator.machine import KernelFault

    found: dict[str, Launch] = {}
    for launch in (x for graph in held.graphs for x in graph.launches):
        if any(a.value == SHARED for a in launch.args):
            found.setdefault(launch.kernel, launch)
    for name, launch in found.items():
        binary = held.binary[name]
        where = f"{binary.entry} of {count} ranks: {name}"
        try:
            yield Verdict(where, *_checked(root, held, binary, min(_MOST, int(launch.args[2].value)), count, seed))
        except KernelFault as e:
            yield Verdict(where, False, str(e))


def _checked(root: Path, held: LaunchPlan, binary: Binary, n: int, count: int, seed: int) -> tuple[bool, str]:
    from planc.emulator.device import Device
    from planc.emulator.ranks import Together

    op, rng = "all_gather" if binary.entry == "all_gather" else "all_reduce", np.random.default_rng(seed)
    out = n * (count if op == "all_gather" else 1)
    to = -(-4 * n // 256) * 256
    device = Device(f"an emulated sm_{held.sm}", held.sm, _MEMORY, SMS[held.sm].shared_block)
    gpus = Together(device, count, to + 4 * out, seed)
    image, text = (root / binary.cubin).read_bytes(), (root / binary.ptx).read_text()
    messages = [[rng.standard_normal(n).astype(np.float32) for _ in range(count)] for _ in range(TIMES)]
    for parts, found in zip(messages, gpus.run(image, text, binary, messages, to), strict=True):
        wanted = reference(op, parts)
        for rank, got in enumerate(found):
            wrong = np.flatnonzero(got.view(np.int32) != wanted.view(np.int32))
            if wrong.size:
                at = int(wrong[0])
                return False, f"rank {rank}: {wrong.size} of {out} differ, first {at}: {got[at]} for {wanted[at]}"
    return True, f"the reference's bits on every rank, {n} elements"


def reference(op: str, parts: Sequence[np.ndarray]) -> np.ndarray:
    """What every rank is to have of flat parts."""
    count, n = len(parts), parts[0].size
    attrs: Attrs = {"ranks": count, "starts": tuple(n * r for r in range(count)), "size": n * count}
    (wanted,) = OPS[op].ref(attrs, parts, [TensorType("f32", (n,))] * count)
    return np.asarray(wanted)
