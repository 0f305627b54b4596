"""The paged cache's CUDA kernels under test: in go a case and a step's inputs, out comes what they write."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from planc.codegen.cuda import aot
from planc.codegen.cuda.call import Bucket, Call, calls
from planc.compiler.ir.types import TensorType
from planc.emulator.run import run_kernel
from tests.codegen.cuda.harness import launch
from tests.kernels.harness import Buffer, Case, Tensor

Runner = Callable[[Call, Mapping[str, Buffer]], None]


def made(case: Case, bucket: Bucket, pages: int, arch: int = 90) -> tuple[Call, ...]:
    """The calls of a case; `pages` is the width of the page table."""
    types = dict(zip(case.node.inputs, case.types, strict=True)) | {v.name: v.type for v in case.node.outputs}
    if case.op == "paged_attention":
        types["in2"] = TensorType("i32", ("S", pages))
    return calls(case.node, types, arch, bucket)


def emulated(folder: Path, arch: int) -> Runner:
    """Runs calls as their PTX says, compiled into `folder`. Every pointer has memory of its own there, so what changed
    in each is put together afterwards.
    """

    def runner(call: Call, buffers: Mapping[str, Buffer]) -> None:
        (binary,) = aot.compile([call.kernel], arch, folder)
        whole = [buffers[str(r.value)].data[r.offset :] if r.kind in ("value", "scratch") else None for r in call.args]
        given = [r.value if w is None else w.copy() for r, w in zip(call.args, whole, strict=True)]
        before = [None if w is None else w.copy() for w in whole]
        run_kernel((folder / f"{binary.name}.ptx").read_text(), call.grid, given, binary.shared)  # type: ignore[arg-type]
        for after, old, to in zip(given, before, whole, strict=True):
            if isinstance(after, np.ndarray) and old is not None and to is not None:
                np.copyto(to, after, where=after != old)

    return runner


def attend(
    case: Case, given: Sequence[np.ndarray], bucket: Bucket, arch: int = 90, runner: Runner = launch
) -> np.ndarray:
    """The output rows of a step, all of the bucket; inputs are padded to it as a plan's are."""
    q, kv, table, start, positions, *per_head = given
    start = np.pad(start, (0, bucket.seqs + 1 - len(start)), mode="edge")
    table = np.pad(table, ((0, bucket.seqs - len(table)), (0, 0)))
    positions = np.pad(positions, (0, bucket.tokens - len(positions)))
    q = np.pad(q, ((0, bucket.tokens - len(q)), (0, 0), (0, 0)), constant_values=np.nan)
    arrays = [q, kv, table, start, positions, *per_head]
    out = Tensor(case.node.out.type, (bucket.tokens, *case.node.out.type.shape[1:]))
    run(made(case, bucket, table.shape[1], arch), case, arrays, {"out0": out.buffer}, runner)
    return out.array.copy()


def run(
    launches: Sequence[Call],
    case: Case,
    arrays: Sequence[np.ndarray],
    outputs: Mapping[str, Buffer],
    runner: Runner = launch,
) -> dict[str, Buffer]:
    """Launches in order. The inputs are returned, and checked to be what they were but those that are written."""
    inputs = {n: Tensor.of(t, a).buffer for n, t, a in zip(case.node.inputs, case.types, arrays, strict=True)}
    before = {n: b.data.copy() for n, b in inputs.items()}
    scratch = {n: Buffer(size) for call in launches for n, size in call.scratch.items()}
    buffers = {**inputs, **outputs, **scratch}
    for call in launches:
        runner(call, buffers)
    written = {n for call in launches for n in call.writes}
    for name, buffer in buffers.items():
        buffer.check(f"{case}: {name}")
        assert name in written or (buffer.data == before[name]).all(), f"{case}: {name} changed"
    return inputs
