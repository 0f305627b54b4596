"""The costly ops by torch against their references, on the samples of every op."""

import numpy as np
import pytest

from planc.compiler.calibrate.fast import ref
from planc.compiler.ir.ops import OPS
from tests.compiler.ir.samples import Sample, samples

SAMPLES = [s for s in samples() if ref(s.op) is not OPS[s.op].ref and not s.layouts]


def test_the_costly_ops_are_among_the_samples() -> None:
    assert {"linear", "attention", "rms_norm", "add_rms_norm", "act_mul", "gelu", "fused"} <= {s.op for s in SAMPLES}


@pytest.mark.parametrize("s", SAMPLES, ids=lambda s: s.op)
def test_the_same_values(s: Sample) -> None:
    args = [a.astype(np.float32) if a.dtype.kind == "V" else a for a in s.args]  # bf16: calibration widens weights
    for got, want in zip(ref(s.op)(s.attrs, args, s.types()), OPS[s.op].ref(s.attrs, args, s.types()), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
