"""CUDA kernels under test: in go ops with types and arrays, out come what the interpreter computes, guards checked."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

import planc.codegen.cuda
from planc.codegen.cuda.call import Bucket, Call, Ref, calls
from planc.compiler.ir.ops import OPS
from planc.compiler.ir.types import TensorType
from planc.emulator import interpreter
from tests.kernels.harness import Buffer, Case, Tensor

KERNELS = Path(planc.codegen.cuda.__file__).parent / "kernels"
Array = np.ndarray


def made(case: Case, arch: int, tokens: int, rows: int = 1) -> tuple[Call, ...]:
    """The calls of a case in a bucket."""
    types = dict(zip(case.node.inputs, case.types, strict=True))
    types |= {v.name: v.type for v in case.node.outputs}
    return calls(case.node, types, arch, Bucket(tokens, 1, rows))


def run(case: Case, arrays: Sequence[Array], arch: int, *, inplace: bool = False) -> list[Array]:
    """The outputs of a case. Inputs must stay as they are, but the one whose buffer the output takes (`inplace`)."""
    sizes = _sizes(case, arrays)
    launches = made(case, arch, sizes.get("T", 1), sizes.get("R", 1))
    node = case.node
    tensors = {n: Tensor.of(t, a) for n, t, a in zip(node.inputs, case.types, arrays, strict=True)}
    shapes = [[d if isinstance(d, int) else sizes[d] for d in v.type.shape] for v in node.outputs]
    outs = {v.name: Tensor(v.type, shape) for v, shape in zip(node.outputs, shapes, strict=True)}
    if inplace:
        given = tensors.pop(node.inputs[OPS[node.op].inplace or 0])
        outs[node.out.name] = given
    scratch = {n: Buffer(size) for c in launches for n, size in c.scratch.items()}
    before = {n: t.buffer.data.copy() for n, t in tensors.items()}
    buffers = {n: t.buffer for n, t in (tensors | outs).items()} | scratch
    names = {node.inputs[OPS[node.op].inplace or 0]: outs[node.out.name].buffer} if inplace else {}
    for call in launches:
        launch(call, buffers | names)
    for n, b in buffers.items():
        b.check(f"{case}: {n}")
    for n, data in before.items():
        np.testing.assert_array_equal(tensors[n].buffer.data, data, err_msg=f"{case}: input {n} changed")
    return [np.ascontiguousarray(outs[v.name].array) for v in node.outputs]


def launch(call: Call, buffers: Mapping[str, Buffer]) -> None:
    """One call on the CPU."""
    declared = {*call.reads, *call.writes}
    used = {str(r.value) for r in call.args if r.kind in ("value", "scratch")}
    assert used == declared, f"{call.kernel.name}: arguments {sorted(used)}, declared {sorted(declared)}"
    kernel = call.kernel
    assert len(kernel.signature) == len(call.args)
    values = {n: _number(r, buffers) for n, r in zip(kernel.signature, call.args, strict=True)}
    for n in kernel.aligned:
        assert values[n] % 16 == 0, f"{kernel.name}: {n} = {values[n]} is not aligned"
    memory = interpreter.Memory.of([(b.data.ctypes.data, len(b.data)) for b in buffers.values()])
    path = KERNELS / f"{kernel.source}.py"
    interpreter.launch(path, kernel.function, kernel.signature, kernel.constants, call.grid, values, memory)


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
