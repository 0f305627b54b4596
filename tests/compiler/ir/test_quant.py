"""Schemes: rounding within half a step of each code, blocks and groups by their own range, bounds that clip."""

import ml_dtypes
import numpy as np
import pytest

from planc.compiler.ir.quant import SCHEMES, fitted, quantize_rows, scheme
from planc.compiler.ir.types import TensorType

RNG = np.random.default_rng(0)
MADE = [name for name, row in SCHEMES.items() if not row.read_only]


def weight(*shape: int) -> np.ndarray:
    """Rows and groups of very unlike sizes, one of them zero."""
    w = RNG.standard_normal(shape).astype(np.float32)
    w *= 10.0 ** RNG.integers(-3, 3, (*shape[:-1], 1)).astype(np.float32)
    w[..., 3, :] = 0
    w[..., 5, :32] = 0
    return w


def restored(name: str, w: np.ndarray, clip: np.ndarray | None = None) -> np.ndarray:
    row = scheme(name)
    return row.dequantize(*(row.part(w, part, clip) for part in row.parts))


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("shape", [(70, 256), (3, 140, 384)])
def test_the_error_is_at_most_half_a_step(name: str, shape: tuple[int, ...]) -> None:
    row, w = scheme(name), weight(*shape)
    error = np.abs(restored(name, w) - w)
    if row.codes == "f8e4m3":  # three bits of mantissa: half a step is a sixteenth, of the least exponent at least
        least = _spread(row, row.part(w, "s"), shape) * 2.0**-10
        assert (error <= np.maximum(np.abs(w) / 16, least) * 1.0001).all()
        return
    step = np.abs(_spread(row, row.part(w, "s"), shape))
    edge = 1.0 if row.offset else 0.5  # +8 of a signed code is cut to +7
    if row.scales == "bf16":  # rounded down, the largest code falls short of the range
        edge += row.limit * 2.0**-8
    assert (error <= step * edge * 1.0001 + 1e-30).all()
    assert (error[..., 3, :] == 0).all()


def _spread(row, s: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return row._spread(s, shape[-1])


@pytest.mark.parametrize("name", MADE)
def test_a_large_weight_is_quantized_in_parts_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w = weight(300, 256)
    whole = [scheme(name).part(w, p) for p in scheme(name).parts]
    monkeypatch.setattr("planc.compiler.ir.quant._ELEMENTS", 128 * 256)
    for a, p in zip(whole, scheme(name).parts, strict=True):
        assert (scheme(name).part(w, p) == a).all()


@pytest.mark.parametrize("name", MADE)
def test_bounds_clip_the_range(name: str) -> None:
    """An outlier beyond the bounds no longer makes the steps of its neighbours coarse."""
    w = RNG.standard_normal((64, 256)).astype(np.float32)
    w[:, 7] = 40
    s = scheme(name).part(w, "s")
    clip = np.full(s.shape, 4, np.float32)
    others = np.arange(256) != 7
    plain, clipped = restored(name, w), restored(name, w, clip)
    assert np.abs(clipped).max() <= 4 * 1.1
    # codes with an exponent lose nothing by an outlier
    assert np.abs(clipped - w)[:, others].mean() < np.abs(plain - w)[:, others].mean() * (
        1.05 if scheme(name).codes == "f8e4m3" else 0.9
    )


def test_a_block_has_one_scale() -> None:
    row, w = scheme("fp8-block"), weight(200, 300)
    s = row.part(w, "s")
    assert s.shape == (3, 200)
    for i, (n, k) in enumerate((n, k) for k in (0, 128, 256) for n in (0, 128)):
        peak = np.abs(w[n : n + 128, k : k + 128]).max()
        assert (s[i // 2, n : n + 128] == np.float32(peak) / np.float32(448)).all()


@pytest.mark.parametrize("name", ["awq-g32", "int4-g32"])
def test_zero_points_are_codes_where_scales_are_tiny(name: str) -> None:
    w = np.random.default_rng(0).uniform(-1, 0, (40, 64)).astype(np.float32) * np.float32(5e-39)
    assert scheme(name).part(w, "z").astype(np.float32).max() <= 15


def test_int4_reaches_its_extreme_as_its_scale_is_stored() -> None:
    w = RNG.standard_normal((8, 128)).astype(np.float32)
    made = restored("int4-wo", w)
    at = np.abs(w).argmax(axis=1)
    np.testing.assert_allclose(made[np.arange(8), at], w[np.arange(8), at], rtol=2.0**-8)
    assert made[0, at[0]] == np.float32(scheme("int4-wo").part(w, "s")[0, 0]) * -8


def test_outliers_have_a_second_digit_in_rows_and_weights() -> None:
    row, w, outliers = scheme("fp8"), weight(40, 96), np.array([5, 17, 90], np.int32)
    x = RNG.standard_normal((50, 96)).astype(np.float32)
    x[:, outliers] *= 100  # nearly all that the products have
    codes, scale = quantize_rows(x, "f8e4m3", outliers=outliers)
    q, s = (row.part(w, p, outliers=outliers) for p in row.parts)
    assert codes.shape == (50, 96 + 6)
    assert (q.shape, q.dtype) == ((40, 96 + 6), row.part(w, "q").dtype)
    assert row.part_type(TensorType("f32", w.shape), "q", 3).shape == q.shape
    assert (q[:, :96] == row.part(w, "q")).all()
    made = row.dequantize(q, s)
    want = x.astype(np.float64) @ w.T
    one, _ = quantize_rows(x, "f8e4m3")
    once = one.astype(np.float64) * scale[:, None] @ made[:, :96].T
    twice = codes.astype(np.float64) * scale[:, None] @ made.T
    assert np.square(twice - want).sum() < np.square(once - want).sum() / 100
    whole = row.folded(made, outliers)
    assert whole.shape == w.shape
    assert (np.abs(whole - w)[:, outliers] <= np.abs(w)[:, outliers] / 256 + s[:, None] / 512).all()


def test_only_float_codes_by_channel_have_a_second_digit() -> None:
    for name in ("int8", "fp8-block", "awq-g32"):
        with pytest.raises(ValueError, match=f"scheme {name} keeps no features to two digits"):
            scheme(name).part(weight(40, 96), "q", outliers=np.array([1], np.int32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", MADE)
def test_a_weight_that_is_no_number_is_refused(name: str, bad: float) -> None:
    w = weight(70, 256)
    w[2, 130] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        scheme(name).part(w, "s")


def test_nothing_is_quantized_to_what_checkpoints_alone_hold() -> None:
    with pytest.raises(ValueError, match="read from checkpoints"):
        scheme("mxfp4").part(weight(70, 256), "q")


def test_group_sizes_are_fitted_to_the_weight() -> None:
    assert [fitted("awq", k) for k in (256, 576, 96)] == ["awq-g128", "awq-g64", "awq-g32"]
    assert fitted("int4-wo-g32", 256) == "int4-wo-g32"
    assert fitted("int8", 7) == "int8"
    with pytest.raises(ValueError, match=r"no group size of awq-g64 \(64, 32\) divides its 48"):
        fitted("awq-g64", 48)
    with pytest.raises(KeyError, match="awq-g64"):
        scheme("nf4")


@pytest.mark.parametrize(("dtype", "step"), [("i8", 0.5 / 127), ("f8e4m3", 1 / 16)])
def test_rows_round_by_their_own_size(dtype: str, step: float) -> None:
    x = RNG.standard_normal((6, 3, 40)).astype(np.float32) * 10.0 ** RNG.integers(-4, 4, (6, 3, 1))
    x = x.astype(np.float32)
    x[1, 1] = 0
    codes, scale = quantize_rows(x, dtype)
    assert codes.dtype == {"i8": np.int8, "f8e4m3": ml_dtypes.float8_e4m3fn}[dtype]
    made = codes.astype(np.float32) * scale[..., None]
    bound = np.abs(x).max(axis=-1, keepdims=True) * step
    assert (np.abs(made - x) <= bound * 1.001).all()
    assert scale[1, 1] == 0
    assert not codes[1, 1].astype(np.float32).any()
    one, s = quantize_rows(x[4:5], dtype)
    assert (one == codes[4:5]).all()
    assert (s == scale[4:5]).all()
