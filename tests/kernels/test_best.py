"""The best column of a layer's rows: its place and its bits are those of the results, whatever the threads."""

import ctypes
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planc.codegen.cpu import build_library
from planc.codegen.kernel import Kernel
from planc.codegen.program import best_of
from planc.codegen.target import parse
from planc.compiler.ir.types import DTYPES, TensorType
from tests.kernels.harness import TARGETS, Case, Tensor, _Sizes, case, f32, joined, tensor
from tests.kernels.test_schemes import arrays, linear

N, THREADS = 330, 3
CASES = {
    "f32, k cut": case("linear", f32("T", 700), tensor("f32", N, 700, layout="n64"), f32(N), bias=True),
    "bf16": case("linear", f32("T", 70), tensor("bf16", N, 70, layout="n64k2")),
    "bf16, k cut": case("linear", f32("T", 1600), tensor("bf16", N, 1600, layout="n64k2")),
    "int8": linear("int8", N, 518),
    "int8, k cut": linear("int8", N, 2100),
    "int8-wo, k cut": linear("int8-wo", N, 2100, bias=True),
    "int4-g32": linear("int4-g32", N, 96),
    "awq-g32, k cut": linear("awq-g32", N, 2112),
}
PAIRS = [
    (t, name)
    for t in dict.fromkeys((TARGETS[0], TARGETS[-1]))
    for name in CASES
    if t == TARGETS[-1] or name in list(CASES)[:2]
]


class Both:
    """A layer and what chooses of it, compiled for a target."""

    def __init__(self, c: Case, target: str, folder: Path) -> None:
        self.case, kernel = c, c.kernel(parse(target))
        best = best_of(kernel)
        assert best is not None
        self.library = ctypes.CDLL(str(build_library({"both.cpp": joined([kernel, best])}, parse(target), folder)))
        self.kernel, self.best = kernel, best
        self.most = ctypes.c_int32.in_dll(self.library, f"{best.name}_rows").value

    def run(self, kernel: Kernel, given: list[np.ndarray], out: TensorType, rows: int, threads: int) -> np.ndarray:
        inputs = [Tensor.of(t, a) for t, a in zip(self.case.types, given, strict=True)]
        made = Tensor(replace(out, shape=(rows, *out.shape[1:])), (rows, *(int(d) for d in out.shape[1:])))
        buffers = (ctypes.c_void_p * (len(inputs) + 1))(*(t.buffer.data.ctypes.data for t in (*inputs, made)))
        memory = np.zeros((1 << 16) + 64, np.uint8)
        scratch = memory[-memory.ctypes.data % 64 :][: 1 << 16]
        sizes = _Sizes(rows, rows, rows, 0, scratch.ctypes.data, len(scratch))
        for thread in range(threads):
            getattr(self.library, kernel.name)(buffers, ctypes.byref(sizes), rows, thread, threads)
        assert not scratch[:4096].any()
        made.buffer.check(kernel.name)
        return made.array.copy()

    def check(self, given: list[np.ndarray], rows: int) -> np.ndarray:
        """Compares both; the columns that are best."""
        y = self.run(self.kernel, given, self.case.node.out.type, rows, 1)
        for threads in (1, THREADS, 40):  # more than there are columns to share
            chosen = self.run(self.best, given, TensorType("i32", ("T", 2)), rows, threads)
            assert chosen[:, 0].tolist() == [int(row.argmax()) for row in y]
            assert chosen[:, 1].tobytes() == y.max(axis=1).tobytes()
        return chosen[:, 0]


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    target, name = request.param
    return Both(CASES[name], target, tmp_path_factory.mktemp("best"))


def given_of(c: Case, rows: int) -> list[np.ndarray]:
    if c.op == "qlinear":
        return arrays(c, rows, seed=rows)
    rng = np.random.default_rng(rows)
    shapes = [tuple(rows if d == "T" else int(d) for d in t.shape) for t in c.types]
    return [rng.standard_normal(s).astype(DTYPES[t.dtype]) for s, t in zip(shapes, c.types, strict=True)]


def test_the_place_and_the_bits_of_the_layers_best(both: Both) -> None:
    assert both.most >= 100
    found = [both.check(given_of(both.case, rows), rows) for rows in (1, 2, 5, 23, 64, 100)]
    assert len(np.unique(np.concatenate(found))) > 5


def test_of_equals_the_first_and_no_number_is_none(both: Both) -> None:
    rows = 4
    given = given_of(both.case, rows)
    first = next(i for i, t in enumerate(both.case.types) if t.layout.startswith("n64"))
    for part in range(first, len(given)):  # of the weight, and of its bias: all columns are equal
        axis = given[part].ndim - 1 if part > first else 0
        given[part][...] = np.take(given[part], [0], axis=axis)
    assert both.check(given, rows).tolist() == [0] * rows
    if both.case.types[0].dtype != "f32":
        return
    given = given_of(both.case, rows)
    given[0][2, 1] = np.nan
    chosen = both.run(both.best, given, TensorType("i32", ("T", 2)), rows, THREADS)
    assert chosen[2, 0] == -1
    assert np.isnan(chosen[:, 1].view(np.float32)).tolist() == [False, False, True, False]
    assert (chosen[[0, 1, 3], 0] >= 0).all()
