"""kv_append, rotary_append: keys and values land where the reference puts them, rounded as it does, nowhere else."""

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


SCALED = [
    Shape(2, 2, 20, 33, dtype="i8"),
    Shape(2, 2, 20, 33, dtype="f8e3m4"),
    Shape(4, 1, 16, 128, block=32, dtype="i8"),
    Shape(4, 3, 64, 5, block=32, dtype="f8e3m4"),
]
TURNS = [(SHAPES[0], 16, True), (SHAPES[1], 20, False), (SCALED[0], 20, True), (SCALED[3], 34, False)]


def turning(s: Shape, width: int, inter: bool) -> Case:
    """Queries and keys are views of one projection, `width` of whose features turn."""
    wide = (s.heads + 2 * s.kv_heads) * s.k_dim
    q, k = (f32("T", n, s.k_dim, layout=f"strides:{wide},{s.k_dim}") for n in (s.heads, s.kv_heads))
    tables = [f32(50, width // 2)] * 2
    rest = (f32("T", s.kv_heads, s.v_dim), *tables, i32("T"), i32("T"), tensor("u8", "P", int(s.cache["page_bytes"])))
    return case("rotary_append", q, k, *rest, interleaved=inter, **s.cache)


CASES = {s: append(s) for s in SHAPES + SCALED} | {turn: turning(*turn) for turn in TURNS}


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
    c = CASES[s]
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
    library.run(CASES[s], [random(2, 2, 20), random(2, 2, 20), np.array([-1, -5], np.int32), cache], 2)
    assert (cache == before).all()


def ties(x: np.ndarray, dtype: str) -> np.ndarray:
    """Each row's largest magnitude becomes the limit, so that the scale is 1 and halves of a code are ties."""
    limit, step = (127, 0.5) if dtype == "i8" else (15.5, 2.0**-7)
    x = np.clip(np.rint(x * 8 / step) * step, -limit, limit)
    x.reshape(-1, x.shape[-1])[:, 0] = limit
    return x.astype(np.float32)


@pytest.mark.parametrize("s", SCALED, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_codes_and_scales_are_the_reference_s(library: Library, s: Shape, threads: int) -> None:
    """To the bit, in values of any size, at ties, in vectors of zeros and where scales are denormal."""
    c = CASES[s]
    table, pages = page_table([40, 70], s.block)
    where = np.concatenate([slots(table, 0, np.arange(9, 20), s.block), slots(table, 1, np.arange(65, 70), s.block)])
    seed = np.random.SeedSequence().entropy
    rng = np.random.default_rng(seed)
    size = 2.0 ** rng.integers(-30, 30, (len(where), 1, 1)).astype(np.float32)
    k, v = (rng.standard_normal((len(where), s.kv_heads, d)).astype(np.float32) * size for d in (s.k_dim, s.v_dim))
    for x in (k, v):
        x[0], x[1], x[2] = 0.0, ties(x[1] / size[1], s.dtype), x[2] / size[2] * 1e-40
        x[3, 0, 1:], x[4] = 0.0, x[4] / size[4] * 1e37
    got, want = empty_cache(s, pages), empty_cache(s, pages)
    library.run(c, [k, v, where, got], len(where), threads=threads)
    OPS["kv_append"].ref(dict(c.attrs), [k, v, where, want], c.types)
    assert (got == want).all(), f"seed {seed}"


@pytest.mark.parametrize("turn", TURNS, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_keys_turn_on_their_way(library: Library, turn: tuple[Shape, int, bool], threads: int) -> None:
    """To the bit as the reference turns and writes them; a negative slot is skipped."""
    (s, width, _), c = turn, CASES[turn]
    table, pages = page_table([40, 70], s.block)
    where = np.concatenate([slots(table, 0, np.arange(13, 20), s.block), slots(table, 1, np.arange(65, 70), s.block)])
    where[4] = -1
    q, k, v = (
        random(12, h, d, seed=h + d) for h, d in ((s.heads, s.k_dim), (s.kv_heads, s.k_dim), (s.kv_heads, s.v_dim))
    )
    angles = [random(50, width // 2, seed=i) for i in range(2)]
    positions = np.arange(30, 42, dtype=np.int32)
    got, want = empty_cache(s, pages), empty_cache(s, pages)
    (turned,) = library.run(c, [q, k, v, *angles, positions, where, got], 12, threads=threads)
    there = where >= 0
    args = [x[there] for x in (q, k, v)], [x[there] for x in (positions, where)]
    (known,) = OPS[c.op].ref(dict(c.attrs), [*args[0], *angles, *args[1], want], c.types)
    assert (turned[there] == known).all()
    assert (got == want).all()


@pytest.mark.parametrize("s", SCALED[:2], ids=str)
def test_a_vector_that_is_no_number_spoils_itself_alone(library: Library, s: Shape) -> None:
    c = CASES[s]
    table, pages = page_table([20], s.block)
    where = slots(table, 0, np.arange(6), s.block)
    k, v = random(6, s.kv_heads, s.k_dim), random(6, s.kv_heads, s.v_dim, seed=1)
    clean, spoilt, want = (empty_cache(s, pages) for _ in range(3))
    library.run(c, [k, v, where, clean], 6)
    for i, bad in enumerate((np.nan, np.inf, -np.inf)):
        k[i, 0, -1 - i] = v[i + 1, 1, i] = bad
    library.run(c, [k, v, where, spoilt], 6)
    OPS["kv_append"].ref(dict(c.attrs), [k, v, where, want], c.types)
    for name, broken in (("k", [(0, 0), (1, 0), (2, 0)]), ("v", [(1, 1), (2, 1), (3, 1)])):
        before, after, reference = (scales_of(s, cache, name) for cache in (clean, spoilt, want))
        for token, (page, slot) in enumerate(places(where, s)):
            for head in range(s.kv_heads):
                own = after[page, head, slot]
                assert np.isnan(own) if (token, head) in broken else own == before[page, head, slot]
        assert (np.isnan(reference) == np.isnan(after)).all()


def places(where: np.ndarray, s: Shape) -> list[tuple[int, int]]:
    return [divmod(int(slot), s.block) for slot in where]


def scales_of(s: Shape, cache: np.ndarray, name: str) -> np.ndarray:
    """f32 [P, heads, block]: the scales of K or V."""
    start, count = int(s.cache[f"{name}_scale_offset"]), s.kv_heads * s.block
    return cache[:, start : start + 4 * count].copy().view(np.float32).reshape(len(cache), s.kv_heads, s.block)
