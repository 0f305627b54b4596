"""CUDA kernels of the paged cache: against the reference, and the same bits whatever shares a step."""

import numpy as np
import pytest

from planc.codegen.cuda import attention as rows
from planc.codegen.cuda.call import Bucket
from planc.compiler.ir.ops import OPS
from planc.compiler.ir.types import DTYPES
from planc.errors import PlancError
from tests.codegen.cuda.harness import launch
from tests.codegen.cuda.paged import Runner, attend, made, run
from tests.kernels.harness import Case, Tensor, assert_close, assert_same_bits, case, f32, i32, random, tensor
from tests.kernels.paged import Shape, empty_cache, page_table, slots
from tests.kernels.test_attention import World, attention

BOUNDS = {"f32": 2e-6, "bf16": 1e-2, "i8": 1e-2, "f8e4m3": 1e-2}
ROWS = {  # name -> geometry and what differs from the plain causal mask
    "mha": (Shape(2, 2, 16, 16), {}),
    "gqa 3, bf16": (Shape(9, 3, 64, 64, dtype="bf16"), {}),
    "gqa 4, odd, view": (Shape(8, 2, 80, 48), {"q": "strides:700,80"}),
    "gqa 7, bf16": (Shape(7, 1, 96, 96, dtype="bf16"), {}),
    "mqa 8, block 32, i8": (Shape(8, 1, 128, 128, block=32, dtype="i8"), {}),
    "mqa 71, bf16": (Shape(71, 1, 64, 64, dtype="bf16"), {}),
    "head 256, sliding, bf16": (Shape(4, 1, 256, 256, dtype="bf16"), {"kind": "sliding", "window": 100}),
    "sliding over blocks, i8": (Shape(2, 1, 16, 16, dtype="i8"), {"kind": "sliding", "window": 65}),
    "sliding of one": (Shape(2, 2, 16, 8), {"kind": "sliding", "window": 1}),
    "chunked": (Shape(4, 2, 20, 20), {"kind": "chunked", "window": 48}),
    "sinks, bf16": (Shape(4, 2, 16, 33, dtype="bf16"), {"sinks": True}),
    "alibi": (Shape(6, 3, 16, 20), {"alibi": True}),
    "softcap, bf16": (Shape(4, 4, 24, 24, dtype="bf16"), {"softcap": 3.0}),
    "block 8": (Shape(2, 2, 16, 16, block=8, dtype="bf16"), {}),
    "block 24": (Shape(2, 2, 16, 16, block=24, dtype="bf16"), {}),
    "block 128": (Shape(2, 2, 16, 16, block=128, dtype="bf16"), {}),
    "gqa 4, f8": (Shape(8, 2, 64, 80, dtype="f8e4m3"), {}),
    "all at once": (
        Shape(6, 2, 24, 24, block=64),
        {"kind": "sliding", "window": 70, "softcap": 3.0, "sinks": True, "alibi": True},
    ),
    "all at once, i8": (
        Shape(4, 2, 24, 20, dtype="i8"),
        {"kind": "chunked", "window": 100, "softcap": 3.0, "sinks": True, "alibi": True},
    ),
}
QUICK = ("mha", "gqa 3, bf16", "mqa 8, block 32, i8", "sliding of one", "chunked", "sinks, bf16")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ROWS]
CASES: dict[str, Case] = {name: attention(*row) for name, row in ROWS.items()}
LENGTHS = [1, 16, 17, 63, 65, 150]


@pytest.fixture(autouse=True)
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of 128 positions, so that short sequences have several."""
    monkeypatch.setattr(rows, "_SPLIT", 128)


def both_ways(monkeypatch: pytest.MonkeyPatch, c: Case, given: list[np.ndarray], bucket: Bucket) -> np.ndarray:
    """What a step makes with keys in one program and with keys split: the same bits."""
    monkeypatch.setattr(rows, "_FILLED", 0)
    whole = attend(c, given, bucket)
    monkeypatch.setattr(rows, "_FILLED", 1 << 30)
    assert_same_bits(attend(c, given, bucket), whole, f"{c}, split")
    return whole


@pytest.mark.parametrize("name", NAMES)
def test_close_to_the_reference(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    c, world = CASES[name], World(ROWS[name][0], LENGTHS)
    parts = [(i, max(0, n - 3), n) for i, n in enumerate(LENGTHS)]
    given = world.step(parts) + world.per_head(c)
    (want,) = OPS[c.op].ref(dict(c.attrs), given, c.types)
    got = both_ways(monkeypatch, c, given, Bucket(20, 7, 7))
    tokens = len(given[0])
    assert_close(got[:tokens], want, BOUNDS[ROWS[name][0].dtype], name)
    assert (got[tokens:] == 0).all(), "padding"


def test_sequences_without_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    c, world = CASES["gqa 3, bf16"], World(ROWS["gqa 3, bf16"][0], [20, 30])
    want = both_ways(monkeypatch, c, world.step([(1, 10, 30)]), Bucket(20, 1, 1))
    given = world.step([(0, 5, 5), (1, 10, 30), (0, 6, 6)])
    assert_same_bits(both_ways(monkeypatch, c, given, Bucket(20, 3, 3)), want)


def test_more_sequences_than_are_looked_at_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_SEQS", 2)
    c, world = CASES["mha"], World(ROWS["mha"][0], [4] * 7)
    parts = [(i, 1, 4) for i in range(7)]
    (want,) = OPS[c.op].ref(dict(c.attrs), world.step(parts), c.types)
    assert_close(both_ways(monkeypatch, c, world.step(parts), Bucket(21, 7, 7)), want, 2e-6)


@pytest.mark.parametrize("name", ["mha", "sliding over blocks, i8"])
def test_keys_after_the_last_query_may_hold_anything(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    c, world = CASES[name], World(ROWS[name][0], [90])
    before = both_ways(monkeypatch, c, world.step([(0, 60, 80)]), Bucket(20, 1, 1))
    shape = ROWS[name][0]
    k = np.full((10, shape.kv_heads, 16), np.inf, np.float32)
    OPS["kv_append"].ref(shape.cache, [k, k, slots(world.table, 0, np.arange(80, 90), 16), world.cache], [])
    assert_same_bits(both_ways(monkeypatch, c, world.step([(0, 60, 80)]), Bucket(20, 1, 1)), before)


def test_a_nan_reaches_its_head_and_no_earlier_step(monkeypatch: pytest.MonkeyPatch) -> None:
    c, world = CASES["mha"], World(ROWS["mha"][0], [90])
    before = both_ways(monkeypatch, c, world.step([(0, 60, 90)]), Bucket(30, 1, 1))
    k, v = random(1, 2, 16, seed=30), random(1, 2, 16, seed=60)
    v[0, 1, 3] = np.nan
    OPS["kv_append"].ref(ROWS["mha"][0].cache, [k, v, slots(world.table, 0, np.arange(70, 71), 16), world.cache], [])
    after = both_ways(monkeypatch, c, world.step([(0, 71, 90)]), Bucket(19, 1, 1))
    assert np.isnan(after[:, 1, 3]).all()
    assert np.isfinite(after[:, 0]).all()
    assert_same_bits(both_ways(monkeypatch, c, world.step([(0, 60, 70)]), Bucket(10, 1, 1)), before[:10])


def test_scratch_is_bounded_by_the_number_of_splits() -> None:
    """A page table of 131072 positions: splits grow, so that there are 64 of them."""
    c = attention(Shape(32, 8, 128, 128, dtype="bf16"), {})
    first, second = made(c, Bucket(8, 8, 8), 131072 // 16)
    assert first.grid == (8, 8, 64)
    assert first.kernel.constants["SPLIT"] == 2048
    assert first.scratch == second.scratch == {"stats": 8 * 32 * 64 * 8, "acc": 8 * 32 * 64 * 128 * 4}


def test_many_tokens_take_one_launch() -> None:
    c = attention(Shape(32, 8, 128, 128, dtype="bf16"), {})
    (only,) = made(c, Bucket(2048, 64, 64), 512)
    assert only.kernel.function == "attend"
    assert only.grid == (2048 // 16 + 64, 8, 1)


def test_sm_121_has_the_kernels_of_sm_120() -> None:
    c = CASES["gqa 3, bf16"]
    assert made(c, Bucket(1, 1, 1), 64, 121) == made(c, Bucket(1, 1, 1), 64, 120)


def test_what_has_no_kernel_is_named() -> None:
    c = attention(Shape(2, 2, 16, 16, dtype="f8e3m4"), {})
    with pytest.raises(
        PlancError, match=r"paged_attention .* has no kernel on sm_90 .*caches of f32, bf16, i8, f8e4m3"
    ):
        made(c, Bucket(1, 1, 1), 4)
    with pytest.raises(PlancError, match="the width of its rows must be a number"):
        made(CASES["mha"], Bucket(1, 1, 1), "M")  # type: ignore[arg-type]


APPENDS = [Shape(2, 2, 16, 24), Shape(9, 3, 80, 21, dtype="bf16"), Shape(4, 2, 21, 35, dtype="i8", pad=64)]
APPENDS_F8 = Shape(4, 2, 35, 21, dtype="f8e4m3")


def check_append(shape: Shape, runner: Runner, arch: int = 90) -> None:
    """Bit for bit what the reference writes, with padding that writes nothing and an untouched rest of the pages."""
    table, pages = page_table([40, 20], shape.block)
    places = np.concatenate([slots(table, 0, np.arange(14, 40), shape.block), [-1, -1]]).astype(np.int32)
    k = random(len(places), shape.kv_heads, shape.k_dim, seed=1, scale=3.0)
    v = random(len(places), shape.kv_heads, shape.v_dim, seed=2)
    k[0], v[1] = 0.0, np.round(v[1] * 2) / 2
    k[2, 0, 1], v[3, 1, 2], v[4, 0, 0] = np.nan, np.inf, -np.inf
    want = empty_cache(shape, pages)
    OPS["kv_append"].ref(shape.cache, [k[:-2], v[:-2], places[:-2], want], [])
    k_type = f32("T", shape.kv_heads, shape.k_dim, layout=f"strides:{shape.kv_heads * 90 + 7},90")
    types = [k_type, f32("T", shape.kv_heads, shape.v_dim), i32("T"), tensor("u8", "P", int(shape.cache["page_bytes"]))]
    c = case("kv_append", *types, **shape.cache)
    launches = made(c, Bucket(len(places), 2, 2), table.shape[1], arch)
    inputs = run(launches, c, [k, v, places, empty_cache(shape, pages)], {}, runner)
    got = inputs["in3"].data.reshape(want.shape)
    differing = np.flatnonzero(got != want)
    floats = np.isnan(want.view(np.float32).ravel()[differing // 4])  # any NaN is as good as another
    assert floats.all() if shape.dtype != "bf16" else len(differing) <= 2


@pytest.mark.parametrize("shape", [*APPENDS, APPENDS_F8])
def test_append_writes_what_the_reference_writes(shape: Shape) -> None:
    check_append(shape, launch)


TURNS = [(APPENDS[0], 16, True), (APPENDS[1], 64, False), (Shape(4, 2, 21, 35, dtype="i8", pad=64), 20, False)]


def check_turning_append(shape: Shape, width: int, inter: bool, runner: Runner, arch: int = 90) -> None:
    """Close to the reference, of whose codes a turned key's may be neighbours; padding writes nothing."""
    table, pages = page_table([40, 20], shape.block)
    places = np.concatenate([slots(table, 0, np.arange(14, 40), shape.block), [-1, -1]]).astype(np.int32)
    heads = {"q": shape.heads, "k": shape.kv_heads}
    wide = (shape.heads + shape.kv_heads) * shape.k_dim
    q, k = (random(len(places), n, shape.k_dim, seed=n, scale=3.0) for n in heads.values())
    v = random(len(places), shape.kv_heads, shape.v_dim, seed=2)
    angles = [random(64, width // 2, seed=i) for i in range(2)]
    positions = np.arange(10, 10 + len(places), dtype=np.int32)
    views = [f32("T", n, shape.k_dim, layout=f"strides:{wide},{shape.k_dim}") for n in heads.values()]
    tables = [f32(64, width // 2)] * 2
    cache = tensor("u8", "P", int(shape.cache["page_bytes"]))
    types = [*views, f32("T", shape.kv_heads, shape.v_dim), *tables, i32("T"), i32("T"), cache]
    c = case("rotary_append", *types, interleaved=inter, **shape.cache)
    want = empty_cache(shape, pages)
    real = slice(0, len(places) - 2)
    given = [q[real], k[real], v[real], *angles, positions[real], places[real], want]
    (turned,) = OPS["rotary_append"].ref(dict(c.attrs), given, [])
    y = Tensor(c.node.out.type, (len(places), *q.shape[1:]))
    arrays = [q, k, v, *angles, positions, places, empty_cache(shape, pages)]
    inputs = run(
        made(c, Bucket(len(places), 2, 2), table.shape[1], arch), c, arrays, {c.node.out.name: y.buffer}, runner
    )
    assert_close(y.array[real], turned, 1e-6)
    got = inputs["in7"].data.reshape(want.shape)
    off = got != want
    if shape.dtype == "i8":
        assert np.abs(got.view(np.int8)[off].astype(int) - want.view(np.int8)[off]).max(initial=0) <= 1
        assert off.mean() < 1e-2
    else:
        numbers = (np.nan_to_num(x.view(DTYPES[shape.dtype]).astype(np.float32)) for x in (got, want))
        assert_close(*numbers, 1e-6 if shape.dtype == "f32" else 1e-2)


@pytest.mark.parametrize("turn", TURNS, ids=str)
def test_keys_turn_on_their_way_to_the_cache(turn: tuple[Shape, int, bool]) -> None:
    check_turning_append(*turn, launch)
