"""kv_append: keys and values land where the reference puts them, rounded as bfloat16 rounds, and nowhere else."""

import ml_dtypes
import numpy as np
import pytest

from planc.compiler.ir.ops import OPS
from tests.kernels.harness import Case, Library, case, f32, i32, random, tensor
from tests.kernels.paged import Shape, empty_cache, page_table, slots

SHAPES = [Shape(2, 2, 20, 20), Shape(2, 2, 20, 33, dtype="bf16"), Shape(4, 1, 16, 16, block=32, dtype="bf16")]


def append(s: Shape) -> Case:
    page_bytes = int(s.cache["page_bytes"])
    k = f32("T", s.kv_heads, s.k_dim, layout=f"strides:{3 * s.kv_heads * s.k_dim},{s.k_dim + 1}")
    v = f32("T", s.kv_heads, s.v_dim)
    return case("kv_append", k, v, i32("T"), tensor("u8", "P", page_bytes), **s.cache)


CASES = [append(s) for s in SHAPES]


def special(x: np.ndarray) -> np.ndarray:
    """Puts ties, halves of the last place, infinities and NaNs into the first values."""
    bits = np.array(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0x80000001], np.uint32
    )
    x.reshape(-1)[: len(bits)] = bits.view(np.float32)
    return x


@pytest.mark.parametrize("s", SHAPES, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_like_the_reference(library: Library, s: Shape, threads: int) -> None:
    c = CASES[SHAPES.index(s)]
    table, pages = page_table([40, 70], s.block)
    where = np.concatenate([slots(table, 0, np.arange(13, 20), s.block), slots(table, 1, np.arange(69, 70), s.block)])
    k, v = special(random(8, s.kv_heads, s.k_dim)), special(random(8, s.kv_heads, s.v_dim, seed=1))
    got, want = empty_cache(s, pages), empty_cache(s, pages)
    library.run(c, [k, v, where, got], 8, threads=threads)
    dtype = ml_dtypes.bfloat16 if s.dtype == "bf16" else np.float32
    with np.errstate(invalid="ignore"):
        OPS["kv_append"].ref(dict(c.attrs), [k.astype(dtype), v.astype(dtype), where, want], c.types)
    same = got == want
    if not same.all():  # a NaN's payload is free
        a, b = (x.view(np.uint16 if s.dtype == "bf16" else np.uint32) for x in (got, want))
        wide = [x.view(dtype).astype(np.float32) for x in (got, want)]
        assert ((a == b) | (np.isnan(wide[0]) & np.isnan(wide[1]))).all()


def test_a_negative_slot_is_skipped(library: Library) -> None:
    s = SHAPES[0]
    cache = empty_cache(s, 4)
    before = cache.copy()
    library.run(CASES[0], [random(2, 2, 20), random(2, 2, 20), np.array([-1, -5], np.int32), cache], 2)
    assert (cache == before).all()
