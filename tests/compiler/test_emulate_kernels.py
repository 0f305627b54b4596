"""What one kernel is checked by: what was not written is told from what was, in each dtype."""

from types import SimpleNamespace

import numpy as np
import pytest

from planc.codegen.cuda.call import Bucket
from planc.compiler import emulate_kernels as module
from planc.compiler.ir.types import DTYPES, TensorType


@pytest.mark.parametrize("dtype", ["f32", "bf16", "i8", "f8e4m3"])
def test_blocks_that_were_not_run_are_left_out_and_nan_is_not(dtype: str) -> None:
    case = SimpleNamespace(node=SimpleNamespace(op="quantize_rows"))
    want = np.random.default_rng(0).integers(-127, 128, (4, 50)).astype(DTYPES[dtype])
    got = module._poisoned(TensorType(dtype, (4, 50)), Bucket(1, 1, 1))
    assert module._error(case, got, want) == (False, "nothing was written")  # type: ignore[arg-type]
    got[1:3] = want[1:3]
    ok, told = module._error(case, got, want)  # type: ignore[arg-type]
    assert ok, told
    assert told == "relative error 0 of 100 values"
    got[1] = -got[1]
    assert not module._error(case, got, want)[0]  # type: ignore[arg-type]


def test_weights_of_indices_are_features_each_once() -> None:
    inputs = object.__new__(module._Inputs)
    inputs.rng = np.random.default_rng(0)
    node = SimpleNamespace(op="quantize_rows", inputs=("x",))
    inputs.case = SimpleNamespace(node=node, types={"x": TensorType("f32", ("T", 96))})  # type: ignore[assignment]
    made = inputs._weight(TensorType("i32", (64,)))
    assert made.dtype == np.int32
    assert (np.diff(made) > 0).all()
    assert 0 <= made[0] <= made[-1] < 96


def test_a_cache_must_change_where_it_should() -> None:
    case = SimpleNamespace(name="kv_append", node=SimpleNamespace(attrs=()))
    want, before = np.ones(10_000, np.uint8), np.ones(10_000, np.uint8)
    want[:50] = 2
    assert module._equal_bytes(case, want.copy(), want, 50).ok  # type: ignore[arg-type]
    assert not module._equal_bytes(case, before, want, 50).ok  # type: ignore[arg-type]
