"""CUDA kernels under test: in go ops with types and arrays, out come what the interpreter computes, guards checked."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

import planc.codegen.cuda
from planc.codegen.cuda.call import Bucket, Call, Ref, calls
from planc.codegen.cuda.tiles import Tiles
from planc.compiler.ir.ops import OPS
from planc.compiler.ir.types import TensorType
from planc.emulator import interpreter
from tests.kernels.harness import Buffer, Case, Tensor

KERNELS = Path(planc.codegen.cuda.__file__).parent / "kernels"
Array = np.ndarray
Runner = Callable[[Call, Mapping[str, Buffer]], None]


def made(case: Case, arch: int, tokens: int, rows: int = 1, tiles: Tiles | None = None) -> tuple[Call, ...]:
    """The calls of a case in a bucket, products cut by `tiles`."""
    types = dict(zip(case.node.inputs, case.types, strict=True))
    types |= {v.name: v.type for v in case.node.outputs}
    return calls(case.node, types, arch, Bucket(tokens, 1, rows), tiles=tiles)


def launch(call: Call, buffers: Mapping[str, Buffer]) -> None:
    """One call in the interpreter."""
    kernel = call.kernel
    values = {n: _number(r, buffers) for n, r in zip(kernel.signature, call.args, strict=True)}
    for n in kernel.aligned:
        assert values[n] % 16 == 0, f"{kernel.name}: {n} = {values[n]} is not aligned"
    memory = interpreter.Memory.of([(b.data.ctypes.data, len(b.data)) for b in buffers.values()])
    path = KERNELS / f"{kernel.source}.py"
    interpreter.launch(path, kernel.function, kernel.signature, kernel.constants, call.grid, values, memory)


def run(
    case: Case,
    arrays: Sequence[Array],
    arch: int,
    *,
    inplace: bool = False,
    runner: Runner = launch,
    tiles: Tiles | None = None,
) -> list[Array]:
    """The outputs of a case. Inputs must stay as they are, but the one whose buffer the output takes (`inplace`)."""
    sizes = _sizes(case, arrays)
    launches = made(case, arch, sizes.get("T", 1), sizes.get("R", 1), tiles)
    node = case.node
    buffers = {n: Tensor.of(t, a) for n, t, a in zip(node.inputs, case.types, arrays, strict=True)}
    first = node.inputs[OPS[node.op].inplace or 0]
    before = {n: t.buffer.data.copy() for n, t in buffers.items() if not (inplace and n == first)}
    for i, v in enumerate(node.outputs):
        taken = inplace and i == 0
        shape = [d if isinstance(d, int) else sizes[d] for d in v.type.shape]
        buffers[v.name] = buffers[first] if taken else Tensor(v.type, shape)
    data = {n: t.buffer for n, t in buffers.items()}
    data |= {n: Buffer(size) for c in launches for n, size in c.scratch.items()}
    for call in launches:
        _check_declared(call)
        runner(call, data)
    for n, b in data.items():
        b.check(f"{case}: {n}")
    for n, old in before.items():
        np.testing.assert_array_equal(data[n].data, old, err_msg=f"{case}: input {n} changed")
    return [np.ascontiguousarray(buffers[v.name].array) for v in node.outputs]


def _check_declared(call: Call) -> None:
    """What a call reads and writes is what its arguments are."""
    declared = {*call.reads, *call.writes}
    used = {str(r.value) for r in call.args if r.kind in ("value", "scratch")}
    assert used == declared, f"{call.kernel.name}: arguments {sorted(used)}, declared {sorted(declared)}"
    assert len(call.kernel.signature) == len(call.args)


def _number(ref: Ref, buffers: Mapping[str, Buffer]) -> int | float:
    if ref.kind in ("value", "scratch"):
        return buffers[str(ref.value)].data.ctypes.data + ref.offset
    assert not isinstance(ref.value, str)
    return ref.value


def _sizes(case: Case, arrays: Sequence[Array]) -> dict[str, int]:
    """Lengths of symbols, by the arrays."""
    pairs = ((d, n) for t, a in zip(case.types, arrays, strict=True) for d, n in zip(t.shape, a.shape, strict=True))
    return {d: n for d, n in pairs if isinstance(d, str)}


def reference(case: Case, arrays: Sequence[Array]) -> list[Array]:
    """What the op table's reference makes of the arrays, weights in their logical layout."""
    types = [TensorType(t.dtype, t.shape) for t in case.types]
    return list(OPS[case.op].ref(dict(case.attrs), arrays, types))
