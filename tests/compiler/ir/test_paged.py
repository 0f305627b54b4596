"""Paged attention's reference against plain attention: the same numbers, however a sequence lies in the cache."""

import numpy as np
import pytest
from samples import MASKS

from planc.compiler.ir.ops import OPS
from planc.compiler.ir.types import DTYPES

HEADS, QUERIES, K_DIM, V_DIM, BLOCK = 2, 6, 8, 5, 16
PAGE = HEADS * BLOCK * (K_DIM + V_DIM) * 4 + 64


def attrs_of(mask, dtype="f32"):
    size = DTYPES[dtype].itemsize
    kv = {"layer": 0, "heads": HEADS, "k_dim": K_DIM, "v_dim": V_DIM, "block": BLOCK, "dtype": dtype}
    kv |= {"k_offset": 64, "v_offset": 64 + HEADS * K_DIM * BLOCK * size, "page_bytes": PAGE}
    return kv, {**kv, "scale": 0.3, "softcap": 0.0, **mask}


@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m["kind"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_two_sequences_in_scattered_pages_equal_each_alone(mask, dtype) -> None:
    rng = np.random.default_rng(0)
    kv_attrs, attn_attrs = attrs_of(mask, dtype)
    cache = rng.integers(0, 255, (9, PAGE), np.uint8)
    lengths, tables = [37, 18], np.array([[4, 0, 7], [2, 5, 1]], np.int32)
    q, k, v = (rng.standard_normal((sum(lengths), h, d)).astype(np.float32) for h, d in
               ((QUERIES, K_DIM), (HEADS, K_DIM), (HEADS, V_DIM)))  # fmt: skip
    k, v = (a.astype(DTYPES[dtype]).astype(np.float32) for a in (k, v))
    positions = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
    owner = np.repeat([0, 1], lengths)
    slots = tables[owner, positions // BLOCK] * BLOCK + positions % BLOCK
    start = np.array([0, 37, 55], np.int32)
    assert OPS["kv_append"].ref(kv_attrs, (k, v, slots, cache), ()) == ()
    (out,) = OPS["paged_attention"].ref(attn_attrs, (q, cache, tables, start, positions), ())
    for s, rows in enumerate((slice(0, 37), slice(37, 55))):
        (alone,) = OPS["attention"].ref(attn_attrs, (q[rows], k[rows], v[rows]), ())
        np.testing.assert_allclose(out[rows], alone, rtol=1e-6, atol=1e-6, err_msg=f"sequence {s}")
