"""Paged attention's reference against plain attention: the same numbers, however a sequence lies in the cache."""

import ml_dtypes
import numpy as np
import pytest
from samples import MASKS

from planc.compiler.ir.ops import OPS
from planc.compiler.ir.types import DTYPES, TensorType

HEADS, QUERIES, K_DIM, V_DIM, BLOCK = 2, 6, 8, 5, 16
SCALES = 4 * HEADS * BLOCK
PAGE = HEADS * BLOCK * (K_DIM + V_DIM) * 4 + 64
SCALED = ("f8e3m4", "i8")


def attrs_of(mask, dtype="f32"):
    size = DTYPES[dtype].itemsize
    kv = {"layer": 0, "heads": HEADS, "k_dim": K_DIM, "v_dim": V_DIM, "block": BLOCK, "dtype": dtype}
    kv |= {"k_offset": 64, "v_offset": 64 + HEADS * K_DIM * BLOCK * size, "page_bytes": PAGE}
    if dtype in SCALED:
        kv |= {"k_scale_offset": PAGE - 2 * SCALES, "v_scale_offset": PAGE - SCALES}
    return kv, {**kv, "scale": 0.3, "softcap": 0.0, **mask}


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """As the cache holds it, spelt vector by vector."""
    if dtype not in SCALED:
        return x.astype(DTYPES[dtype]).astype(np.float32)
    out = np.empty_like(x)
    for at in np.ndindex(*x.shape[:-1]):
        if dtype == "i8":
            scale = np.abs(x[at]).max() / np.float32(127)
            out[at] = np.round(x[at] / scale) * scale
        else:
            scale = np.abs(x[at]).max() / np.float32(15.5)
            out[at] = (x[at] / scale).astype(ml_dtypes.float8_e3m4).astype(np.float32) * scale
    return out


@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m["kind"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", *SCALED])
def test_two_sequences_in_scattered_pages_equal_each_alone(mask, dtype) -> None:
    rng = np.random.default_rng(0)
    kv_attrs, attn_attrs = attrs_of(mask, dtype)
    cache = rng.integers(0, 255, (9, PAGE), np.uint8)
    lengths, tables = [37, 18], np.array([[4, 0, 7], [2, 5, 1]], np.int32)
    q, k, v = (rng.standard_normal((sum(lengths), h, d)).astype(np.float32) for h, d in
               ((QUERIES, K_DIM), (HEADS, K_DIM), (HEADS, V_DIM)))  # fmt: skip
    positions = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
    owner = np.repeat([0, 1], lengths)
    slots = tables[owner, positions // BLOCK] * BLOCK + positions % BLOCK
    start = np.array([0, 37, 55], np.int32)
    assert OPS["kv_append"].ref(kv_attrs, (k, v, slots, cache), ()) == ()
    (out,) = OPS["paged_attention"].ref(attn_attrs, (q, cache, tables, start, positions), ())
    k, v = rounded(k, dtype), rounded(v, dtype)
    for s, rows in enumerate((slice(0, 37), slice(37, 55))):
        (alone,) = OPS["attention"].ref(attn_attrs, (q[rows], k[rows], v[rows]), ())
        np.testing.assert_allclose(out[rows], alone, rtol=1e-6, atol=1e-6, err_msg=f"sequence {s}")


@pytest.mark.parametrize("dtype", SCALED)
def test_appending_touches_the_codes_and_scales_of_its_slots_alone(dtype) -> None:
    kv_attrs, _ = attrs_of(MASKS[0], dtype)
    cache = np.random.default_rng(1).integers(0, 255, (3, PAGE), np.uint8)
    before = cache.copy()
    k, v = np.ones((1, HEADS, K_DIM), np.float32), np.full((1, HEADS, V_DIM), -2.0, np.float32)
    k[0, 0, 1], v[0, 1] = np.nan, 0.0
    OPS["kv_append"].ref(kv_attrs, (k, v, np.array([2 * BLOCK + 5]), cache), ())
    assert (cache[:2] == before[:2]).all()
    changed = np.flatnonzero(cache[2] != before[2])
    assert len(changed) <= HEADS * (K_DIM + V_DIM + 2 * 4)
    scales = [cache[2, at : at + SCALES].view(np.float32).reshape(HEADS, BLOCK)[:, 5]
              for at in (kv_attrs["k_scale_offset"], kv_attrs["v_scale_offset"])]  # fmt: skip
    limit = np.float32(15.5 if dtype == "f8e3m4" else 127)
    np.testing.assert_array_equal(scales[0], [np.nan, np.float32(1) / limit])
    np.testing.assert_array_equal(scales[1], [np.float32(2) / limit, 0.0])


def test_scales_come_with_elements_of_eight_bits_and_no_others() -> None:
    types = [TensorType("f32", ("T", HEADS, K_DIM)), TensorType("f32", ("T", HEADS, V_DIM)), TensorType("i32", ("T",))]
    types.append(TensorType("u8", ("P", PAGE)))
    scales = {"k_scale_offset": 0, "v_scale_offset": 64}
    plain, scaled = attrs_of(MASKS[0], "bf16")[0], attrs_of(MASKS[0], "i8")[0]
    with pytest.raises(ValueError, match="a cache of bf16 has no k_scale_offset"):
        OPS["kv_append"].infer({**plain, **scales}, types)
    with pytest.raises(ValueError, match="a cache of i8 needs k_scale_offset"):
        OPS["kv_append"].infer({k: v for k, v in scaled.items() if k not in scales}, types)
    with pytest.raises(ValueError, match="no cache of f16"):
        OPS["kv_append"].infer({**plain, "dtype": "f16"}, types)
