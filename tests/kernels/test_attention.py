"""Paged attention: against the float64 reference, and bit-equal alone, batched and in chunks of any size."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from planc.compiler.ir.ops import OPS
from planc.compiler.ir.types import DTYPES
from tests.kernels.harness import Case, Library, assert_close, assert_same_bits, case, f32, i32, random, tensor
from tests.kernels.paged import Shape, empty_cache, page_table, slots

NIGHTLY = ("cpu:x86-64-v4",)  # see conftest.py

MASK = {"scale": 0.25, "kind": "causal", "window": 0, "softcap": 0.0}
ROWS = {  # name -> geometry and what differs from the plain causal mask
    "mha": (Shape(2, 2, 16, 16), {}),
    "gqa 3": (Shape(9, 3, 64, 64), {}),
    "gqa 4, bf16": (Shape(8, 2, 80, 80, dtype="bf16"), {}),
    "gqa 7, view": (Shape(7, 1, 32, 48), {"q": "strides:500,40"}),
    "mqa 8, block 32": (Shape(8, 1, 128, 128, block=32), {}),
    "head 256, sliding": (Shape(4, 1, 256, 256, dtype="bf16"), {"kind": "sliding", "window": 100}),
    "sliding over chunks": (Shape(2, 1, 16, 16), {"kind": "sliding", "window": 257}),
    "sliding of one": (Shape(2, 2, 16, 8), {"kind": "sliding", "window": 1}),
    "chunked": (Shape(4, 2, 20, 20), {"kind": "chunked", "window": 48}),
    "sinks": (Shape(4, 2, 16, 33), {"sinks": True}),
    "alibi": (Shape(6, 3, 16, 20), {"alibi": True}),
    "alibi, sinks, sliding": (
        Shape(4, 2, 24, 24, dtype="bf16"),
        {"kind": "sliding", "window": 300, "softcap": 3.0, "sinks": True, "alibi": True},
    ),
    "mha, bf16": (Shape(2, 2, 16, 16, dtype="bf16"), {}),
    "gqa 3, bf16": (Shape(9, 3, 64, 64, dtype="bf16"), {}),
    "sliding of one, bf16": (Shape(4, 2, 16, 8, dtype="bf16"), {"kind": "sliding", "window": 1}),
    "odd widths, block 32, bf16": (Shape(4, 2, 35, 5, block=32, dtype="bf16"), {"kind": "sliding", "window": 33}),
    "mha, i8": (Shape(2, 2, 16, 16, dtype="i8"), {}),
    "mha, f8": (Shape(2, 2, 16, 16, dtype="f8e3m4"), {}),
    "gqa 3, i8": (Shape(9, 3, 64, 64, dtype="i8"), {}),
    "gqa 3, f8": (Shape(9, 3, 64, 64, dtype="f8e3m4"), {}),
    "mqa 8, block 32, i8": (Shape(8, 1, 128, 128, block=32, dtype="i8"), {}),
    "latent, f8": (Shape(4, 4, 24, 16, dtype="f8e3m4"), {}),
    "odd widths, i8": (Shape(4, 2, 21, 35, dtype="i8"), {"q": "strides:500,40"}),
    "odd widths, block 32, f8": (Shape(4, 2, 35, 5, block=32, dtype="f8e3m4"), {"kind": "chunked", "window": 48}),
    "all at once, i8": (
        Shape(4, 2, 24, 20, dtype="i8"),
        {"kind": "sliding", "window": 300, "softcap": 3.0, "sinks": True, "alibi": True},
    ),
    "all at once, f8": (
        Shape(4, 1, 24, 24, dtype="f8e3m4"),
        {"kind": "sliding", "window": 40, "softcap": 3.0, "sinks": True, "alibi": True},
    ),
    "all at once": (Shape(6, 2, 24, 24, block=64), {"kind": "sliding", "window": 40, "softcap": 3.0, "sinks": True}),
}


def attention(s: Shape, extra: dict) -> Case:
    attrs = {**MASK, **s.cache, **{k: v for k, v in extra.items() if k != "q"}}
    q = f32("T", s.heads, s.k_dim, layout=extra.get("q", "row"))
    types = [q, tensor("u8", "P", int(s.cache["page_bytes"])), i32("S", "M"), i32("S1"), i32("T")]
    per_head = [f32(s.heads)] * (bool(extra.get("sinks")) + bool(extra.get("alibi")))
    return case("paged_attention", *types, *per_head, **attrs)


CASES = {name: attention(*row) for name, row in ROWS.items()}
LENGTHS = [1, 15, 16, 17, 255, 256, 257, 300, 530]


class World:
    """Sequences with their keys and values in the cache, and a query at every position."""

    def __init__(
        self, s: Shape, lengths: Sequence[int], of_value: Callable[[np.ndarray], np.ndarray] = np.array
    ) -> None:
        self.shape, self.lengths = s, list(lengths)
        self.table, pages = page_table(self.lengths, s.block)
        self.cache = empty_cache(s, pages)
        self.q = [random(n, s.heads, s.k_dim, seed=10 + i) for i, n in enumerate(lengths)]
        self.sinks, self.slopes = random(s.heads, seed=5), random(s.heads, seed=6) / 8
        append = {"op": OPS["kv_append"].ref, "attrs": s.cache}
        for i, n in enumerate(lengths):
            k, v = random(n, s.kv_heads, s.k_dim, seed=30 + i), random(n, s.kv_heads, s.v_dim, seed=60 + i)
            append["op"](append["attrs"], [k, of_value(v), slots(self.table, i, np.arange(n), s.block), self.cache], [])

    def step(self, parts: Sequence[tuple[int, int, int]]) -> list[np.ndarray]:
        """Inputs of a step over (sequence, first position, end position)."""
        q = np.concatenate([self.q[s][a:b] for s, a, b in parts])
        positions = np.concatenate([np.arange(a, b) for _, a, b in parts]).astype(np.int32)
        start = np.cumsum([0, *(b - a for _, a, b in parts)]).astype(np.int32)
        return [q, self.cache, self.table[[s for s, _, _ in parts]], start, positions]

    def per_head(self, c: Case) -> list[np.ndarray]:
        return [a for name, a in (("sinks", self.sinks), ("alibi", self.slopes)) if dict(c.attrs).get(name)]

    def run(self, library: Library, c: Case, parts: Sequence[tuple[int, int, int]], threads: int = 1) -> np.ndarray:
        given = self.step(parts) + self.per_head(c)
        tokens = len(given[0])
        sizes = (tokens, len(parts), 0, self.table.shape[1])
        return library.run(c, given, tokens, threads=threads, sizes=sizes)[0]


def reference(c: Case, world: World, parts: Sequence[tuple[int, int, int]]) -> np.ndarray:
    return OPS[c.op].ref(dict(c.attrs), world.step(parts) + world.per_head(c), c.types)[0]


@pytest.mark.parametrize("name", ROWS)
def test_close_to_float64(library: Library, name: str) -> None:
    """Where pairs of bf16 are multiplied, the query is rounded, and each weight by at most 2^-8 of itself."""
    c, world = CASES[name], World(ROWS[name][0], LENGTHS)
    parts = [(i, max(0, n - 9), n) for i, n in enumerate(LENGTHS)]
    magnitudes = World(ROWS[name][0], LENGTHS, np.abs)
    pairs = "bf16" in library.target.features and ROWS[name][0].dtype != "f32"
    if pairs:
        world.q = magnitudes.q = [q.astype(DTYPES["bf16"]).astype(np.float32) for q in world.q]
    got, want = world.run(library, c, parts), reference(c, world, parts)
    if pairs:
        rounding = 2**-8 * reference(c, magnitudes, parts)
        want = np.clip(got, want - rounding, want + rounding)
    assert_close(got, want, 1e-5, name)


@pytest.mark.parametrize("name", ROWS)
def test_chunks_batches_and_threads_change_no_bit(library: Library, name: str) -> None:
    c, world = CASES[name], World(ROWS[name][0], [530, 40, 300])
    whole = world.run(library, c, [(0, 0, 530)])
    batched = world.run(library, c, [(1, 3, 40), (0, 0, 530), (2, 299, 300)], threads=3)
    assert_same_bits(batched[37:567], whole, "batched")
    for size, threads in ((1, 2), (7, 1), (64, 2), (257, 5)):
        starts = range(0, 530, size) if size > 1 else (0, 1, 15, 16, 255, 256, 257, 511, 512, 529)
        for a in starts:
            b = min(a + size, 530)
            assert_same_bits(world.run(library, c, [(0, a, b)], threads), whole[a:b], f"{name}, {a}..{b}")


@pytest.mark.parametrize("name", ROWS)
def test_decode_that_shares_chunks_out_changes_no_bit(library: Library, name: str) -> None:
    """With few sequences and KV heads, each thread takes some of their chunks."""
    lengths = [800, 1, 256, 257]
    c, world = CASES[name], World(ROWS[name][0], lengths)
    parts = [(i, n - 1, n) for i, n in enumerate(lengths)]
    want = world.run(library, c, parts)
    for threads in (2, 3, 5, 16):
        assert_same_bits(world.run(library, c, parts, threads), want, f"{name}, {threads} threads")
        assert_same_bits(world.run(library, c, parts[:1], threads), want[:1], f"{name}, {threads} threads, alone")


@pytest.mark.parametrize("name", ["mha", "mha, bf16", "mha, i8", "mha, f8"])
def test_keys_after_the_query_may_hold_anything(library: Library, name: str) -> None:
    """A later token's key and value change nothing, be they infinite."""
    c, world = CASES[name], World(ROWS[name][0], [300])
    before = world.run(library, c, [(0, 250, 270)])
    k = np.full((30, 2, 16), np.inf, np.float32)
    OPS["kv_append"].ref(ROWS[name][0].cache, [k, k, slots(world.table, 0, np.arange(270, 300), 16), world.cache], [])
    assert_same_bits(world.run(library, c, [(0, 250, 270)]), before)


@pytest.mark.parametrize("name", ["mha", "mha, bf16", "mha, i8", "mha, f8"])
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_a_nan_reaches_those_who_see_it_and_no_others(library: Library, name: str, part: int) -> None:
    """One element of head 1 at position 260 is a NaN: neither head 0 nor earlier tokens change."""
    c, world = CASES[name], World(ROWS[name][0], [300])
    before = world.run(library, c, [(0, 250, 270)])
    kv = [random(1, 2, 16, seed=30), random(1, 2, 16, seed=60)]
    place = slots(world.table, 0, np.arange(260, 261), 16)
    OPS["kv_append"].ref(ROWS[name][0].cache, [*kv, place, world.cache], [])
    clean = world.run(library, c, [(0, 250, 270)])
    kv[part][0, 1, 3] = np.nan
    OPS["kv_append"].ref(ROWS[name][0].cache, [*kv, place, world.cache], [])
    after = world.run(library, c, [(0, 250, 270)])
    assert_same_bits(after[:10], before[:10])
    assert_same_bits(after[:, 0], clean[:, 0])
    assert np.isnan(after[10:, 1, 3]).all()


def test_sequences_without_tokens(library: Library) -> None:
    c, world = CASES["gqa 3"], World(ROWS["gqa 3"][0], [20, 30])
    want = world.run(library, c, [(1, 10, 30)])
    assert_same_bits(world.run(library, c, [(0, 5, 5), (1, 10, 30), (0, 6, 6)]), want)
