"""Every instruction of the arithmetic kind against Python's own integers, exact fractions and ml_dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from planc.errors import PlancError
from tests.emulator.snippet import compute

RNG = np.random.default_rng(0)
EDGES = [0, 1, 2, 3, 7, 31, 32, 33, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]


def wrap(value: int, bits: int, signed: bool) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if signed and value >> (bits - 1) else value


def integers(bits: int, signed: bool, seed: int, count: int = 256) -> np.ndarray:
    """Edge values against each other, then random ones."""
    edges = [e & ((1 << bits) - 1) for e in EDGES]
    order = np.random.default_rng(seed)
    values = [edges[i] for i in order.integers(0, len(edges), count // 2)]
    values += [int(v) for v in order.integers(0, 1 << min(bits, 63), count // 2, dtype=np.uint64)]
    return np.array([wrap(v, bits, signed) for v in values], f"{'i' if signed else 'u'}{bits // 8}")


def trunc_div(a: int, b: int) -> int:
    return int(Fraction(a, b)) if b else 0


def prmt(a: int, b: int, c: int) -> int:
    source = (a | b << 32).to_bytes(8, "little")
    out = 0
    for j in range(4):
        nibble = c >> 4 * j & 15
        byte = source[nibble & 7]
        if nibble & 8:
            byte = 255 if byte & 128 else 0
        out |= byte << 8 * j
    return out


def bfe(a: int, start: int, length: int, bits: int, signed: bool) -> int:
    start, length = start & 255, length & 255
    value = wrap(a, bits, signed) >> min(start, 200)  # Python's shift repeats the sign
    if not signed:
        value &= (1 << bits) - 1
    if length == 0:
        return 0
    if length >= bits:
        return value
    return wrap(value, length, signed)


def bfi(a: int, b: int, start: int, length: int) -> int:
    start, length = start & 255, length & 255
    mask = ((1 << length) - 1) << start & 0xFFFFFFFF
    return (b & ~mask) | (a << start & mask)


Rule = tuple[str, int, bool, int, Callable[..., int], int, bool]
# text, input bits and sign, operands, what Python says, output bits and sign
INTEGER: list[Rule] = [
    ("add.s32 <d>, <0>, <1>;", 32, True, 2, lambda a, b: a + b, 32, True),
    ("sub.u16 <d>, <0>, <1>;", 16, False, 2, lambda a, b: a - b, 16, False),
    ("add.s64 <d>, <0>, <1>;", 64, True, 2, lambda a, b: a + b, 64, True),
    ("mul.lo.s32 <d>, <0>, <1>;", 32, True, 2, lambda a, b: a * b, 32, True),
    ("mul.hi.s32 <d>, <0>, <1>;", 32, True, 2, lambda a, b: a * b >> 32, 32, True),
    ("mul.hi.u32 <d>, <0>, <1>;", 32, False, 2, lambda a, b: a * b >> 32, 32, False),
    ("mul.hi.s64 <d>, <0>, <1>;", 64, True, 2, lambda a, b: a * b >> 64, 64, True),
    ("mul.hi.u64 <d>, <0>, <1>;", 64, False, 2, lambda a, b: a * b >> 64, 64, False),
    ("mul.wide.s32 <d>, <0>, <1>;", 32, True, 2, lambda a, b: a * b, 64, True),
    ("mul.wide.u16 <d>, <0>, <1>;", 16, False, 2, lambda a, b: a * b, 32, False),
    ("mad.lo.s32 <d>, <0>, <1>, <2>;", 32, True, 3, lambda a, b, c: a * b + c, 32, True),
    ("mad.hi.u32 <d>, <0>, <1>, <2>;", 32, False, 3, lambda a, b, c: (a * b >> 32) + c, 32, False),
    ("min.s32 <d>, <0>, <1>;", 32, True, 2, min, 32, True),
    ("max.u32 <d>, <0>, <1>;", 32, False, 2, max, 32, False),
    ("max.s32 <d>, <0>, <1>, <2>;", 32, True, 3, max, 32, True),
    ("and.b32 <d>, <0>, <1>;", 32, False, 2, lambda a, b: a & b, 32, False),
    ("or.b64 <d>, <0>, <1>;", 64, False, 2, lambda a, b: a | b, 64, False),
    ("xor.b16 <d>, <0>, <1>;", 16, False, 2, lambda a, b: a ^ b, 16, False),
    ("not.b32 <d>, <0>;", 32, False, 1, lambda a: ~a, 32, False),
    ("neg.s32 <d>, <0>;", 32, True, 1, lambda a: -a, 32, True),
    ("abs.s32 <d>, <0>;", 32, True, 1, abs, 32, True),
    ("shl.b32 <d>, <0>, <1>;", 32, False, 2, lambda a, b: a << min(b, 40), 32, False),
    ("shl.b32 <d>, <0>, 35;", 32, False, 1, lambda a: 0, 32, False),
    ("shl.b32 <d>, <0>, 5;", 32, False, 1, lambda a: a << 5, 32, False),
    ("shr.u32 <d>, <0>, <1>;", 32, False, 2, lambda a, b: a >> min(b, 40), 32, False),
    ("shr.s32 <d>, <0>, 31;", 32, True, 1, lambda a: a >> 31, 32, True),
    ("shr.s32 <d>, <0>, 99;", 32, True, 1, lambda a: a >> 99, 32, True),
    ("shf.l.wrap.b32 <d>, <0>, <1>, <2>;", 32, False, 3, lambda a, b, c: (b << 32 | a) << (c & 31) >> 32, 32, False),
    ("shf.r.clamp.b32 <d>, <0>, <1>, <2>;", 32, False, 3, lambda a, b, c: (b << 32 | a) >> min(c, 32), 32, False),
    ("bfe.u32 <d>, <0>, <1>, <2>;", 32, False, 3, lambda a, b, c: bfe(a, b, c, 32, False), 32, False),
    ("bfe.u32 <d>, <0>, 4, 3;", 32, False, 1, lambda a: a >> 4 & 7, 32, False),
    ("bfe.s32 <d>, <0>, 2, 1;", 32, True, 1, lambda a: -(a >> 2 & 1), 32, True),
    ("bfi.b32 <d>, <0>, <1>, <2>, 5;", 32, False, 3, lambda a, b, c: bfi(a, b, c, 5), 32, False),
    ("prmt.b32 <d>, <0>, <1>, 0x5410;", 32, False, 2, lambda a, b: prmt(a, b, 0x5410), 32, False),
    ("prmt.b32 <d>, <0>, <1>, 0xD3F8;", 32, False, 2, lambda a, b: prmt(a, b, 0xD3F8), 32, False),
    ("prmt.b32 <d>, <0>, <1>, <2>;", 32, False, 3, prmt, 32, False),
    ("lop3.b32 <d>, <0>, <1>, <2>, 0xE8;", 32, False, 3, lambda a, b, c: a & b | a & c | b & c, 32, False),
    ("lop3.b32 <d>, <0>, <1>, <2>, 0xCA;", 32, False, 3, lambda a, b, c: a & b | ~a & c, 32, False),
    ("popc.b32 <d>, <0>;", 32, False, 1, lambda a: a.bit_count(), 32, False),
    ("clz.b32 <d>, <0>;", 32, False, 1, lambda a: 32 - a.bit_length(), 32, False),
    ("brev.b32 <d>, <0>;", 32, False, 1, lambda a: int(f"{a:032b}"[::-1], 2), 32, False),
    ("cvt.s64.s32 <d>, <0>;", 32, True, 1, lambda a: a, 64, True),
    ("cvt.u64.u32 <d>, <0>;", 32, False, 1, lambda a: a, 64, False),
    ("cvt.u16.u32 <d>, <0>;", 32, False, 1, lambda a: a, 16, False),
    ("cvt.s32.s8 <d>, <0>;", 32, True, 1, lambda a: wrap(a, 8, True), 32, True),
    ("cvt.sat.u8.s32 <d>, <0>;", 32, True, 1, lambda a: min(max(a, 0), 255), 16, False),
    ("setp.lt.s32 %p1, <0>, <1>; selp.b32 <d>, 1, 2, %p1;", 32, True, 2, lambda a, b: 1 if a < b else 2, 32, False),
    ("setp.hi.u32 %p1, <0>, <1>; selp.b32 <d>, 1, 2, %p1;", 32, False, 2, lambda a, b: 1 if a > b else 2, 32, False),
    (
        "setp.eq.s32 %p1, <0>, 0; setp.ge.or.s32 %p2|%p3, <0>, <1>, %p1; selp.b32 %r1, 1, 0, %p2;"
        "selp.b32 %r2, 2, 0, %p3; or.b32 <d>, %r1, %r2;",
        32, True, 2, lambda a, b: (a >= b or a == 0) | (a < b or a == 0) * 2, 32, False,
    ),
    ("@!%p0 mov.b32 <d>, <0>; setp.ne.s32 %p1, <0>, 7; @%p1 mov.b32 <d>, 9;", 32, True, 1,
     lambda a: 7 if a == 7 else 9, 32, True),
    ("set.lt.u32.s32 <d>, <0>, <1>;", 32, True, 2, lambda a, b: -(a < b), 32, False),
    ("mov.b32 {%h1, %h2}, <0>; mov.b32 <d>, {%h2, %h1};", 32, False, 1, lambda a: a >> 16 | a << 16, 32, False),
    ("mov.b64 <d>, {<0>, <1>};", 32, False, 2, lambda a, b: a | b << 32, 64, False),
]  # fmt: skip


@pytest.mark.parametrize("rule", INTEGER, ids=lambda r: r[0].split(";")[0].replace("<", "").replace(">", ""))
def test_integers(rule: Rule) -> None:
    text, bits, signed, operands, says, out, out_signed = rule
    inputs = [integers(bits, signed, seed) for seed in range(operands)]
    if "bfe" in text or "bfi" in text or "shl" in text or "shr" in text:
        inputs[1:] = (
            [array % 70 for array in inputs[1:]] if "bfi" not in text else [inputs[1], *[a % 40 for a in inputs[2:]]]
        )
    got = compute(text, inputs, np.dtype(f"{'i' if out_signed else 'u'}{out // 8}"))
    expected = [wrap(says(*map(int, row)), out, out_signed) for row in zip(*inputs, strict=True)]
    assert got.tolist() == expected


@pytest.mark.parametrize("kind", ["s32", "u32"])
def test_division_goes_towards_zero(kind: str) -> None:
    signed = kind == "s32"
    a, b = integers(32, signed, 1), integers(32, signed, 2)
    b[b == 0] = 3
    keep = ~((a == -(2**31)) & (b == -1)) if signed else np.ones(len(a), bool)  # that quotient does not exist
    a, b = np.where(keep, a, 5).astype(a.dtype), b
    got = compute(f"div.{kind} <d>, <0>, <1>;", [a, b], a.dtype)
    rest = compute(f"rem.{kind} <d>, <0>, <1>;", [a, b], a.dtype)
    quotients = [trunc_div(int(x), int(y)) for x, y in zip(a, b, strict=True)]
    assert got.tolist() == quotients
    assert rest.tolist() == [int(x) - q * int(y) for x, y, q in zip(a, b, quotients, strict=True)]


def reals(seed: int, count: int = 256) -> np.ndarray:
    rng = np.random.default_rng(seed)
    edges = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 3.4e38, 1e-38, 448.0, 449.0, 480.0, 65504.0, 0.1]
    values = rng.standard_normal(count) * 10.0 ** rng.integers(-6, 7, count)
    values[: count // 4] = np.array(edges)[rng.integers(0, len(edges), count // 4)]
    return values.astype(np.float32)


def same(got: np.ndarray, expected: np.ndarray) -> None:
    """Equal bit for bit, any NaN for any other."""
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    keep = ~np.isnan(expected)
    np.testing.assert_array_equal(got[keep].view(f"u{got.itemsize}"), expected[keep].view(f"u{expected.itemsize}"))


def one_rounding(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a·b + c of finite numbers, rounded once."""
    exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]
    return np.array([np.float32(float(v)) for v in exact], np.float32)


def test_fma_rounds_once() -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal(256).astype(np.float32) for _ in range(2))
    c = (-(a * b)).astype(np.float32)  # what is left is the product's own rounding, which two roundings would lose
    got = compute("fma.rn.f32 <d>, <0>, <1>, <2>;", [a, b, c], np.float32)
    assert np.count_nonzero(got) > 200
    same(got, one_rounding(a, b, c))


def where_nan(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(a) | np.isnan(b), np.float32(np.nan), c).astype(np.float32)


FLOAT: list[tuple[str, int, Callable[..., np.ndarray]]] = [
    ("add.f32 <d>, <0>, <1>;", 2, lambda a, b: a + b),
    ("sub.rn.ftz.f32 <d>, <0>, <1>;", 2, lambda a, b: a - b),
    ("mul.f32 <d>, <0>, <1>;", 2, lambda a, b: a * b),
    ("div.full.f32 <d>, <0>, <1>;", 2, lambda a, b: a / b),
    ("min.f32 <d>, <0>, <1>;", 2, lambda a, b: np.where(np.isnan(a), b, np.where(np.isnan(b), a, np.minimum(a, b)))),
    ("max.NaN.f32 <d>, <0>, <1>;", 2, lambda a, b: where_nan(a, b, np.maximum(a, b))),
    ("neg.f32 <d>, <0>;", 1, lambda a: -a),
    ("abs.f32 <d>, <0>;", 1, np.abs),
    ("ex2.approx.ftz.f32 <d>, <0>;", 1, np.exp2),
    ("lg2.approx.f32 <d>, <0>;", 1, np.log2),
    ("sqrt.approx.f32 <d>, <0>;", 1, np.sqrt),
    ("rsqrt.approx.f32 <d>, <0>;", 1, lambda a: (1 / np.sqrt(a.astype(np.float64))).astype(np.float32)),
    ("rcp.rn.f32 <d>, <0>;", 1, lambda a: np.float32(1) / a),
    ("tanh.approx.f32 <d>, <0>;", 1, np.tanh),
    ("cvt.rni.f32.f32 <d>, <0>;", 1, np.rint),
    ("add.f32 <d>, <0>, 0f3F800000;", 1, lambda a: a + np.float32(1)),
    (
        "mov.b64 %l1, {<0>, <1>}; mov.b64 %l2, {<1>, <1>}; mul.f32x2 %l3, %l1, %l2; mov.b64 {<d>, %r1}, %l3;",
        2,
        lambda a, b: a * b,
    ),
]


@pytest.mark.parametrize("rule", FLOAT, ids=lambda r: r[0].split(" ")[0])
def test_floats(rule: tuple[str, int, Callable[..., np.ndarray]]) -> None:
    text, operands, says = rule
    inputs = [reals(seed) for seed in range(operands)]
    with np.errstate(all="ignore"):
        expected = np.asarray(says(*inputs), np.float32)
    same(compute(text, inputs, np.float32), expected)


@pytest.mark.parametrize(
    "test", ["lt", "le", "gt", "ge", "eq", "ne", "ltu", "leu", "gtu", "geu", "equ", "neu", "nan", "num"]
)
def test_comparisons_of_floats_know_nan(test: str) -> None:
    a, b = reals(1), reals(2)
    b[::3] = a[::3]
    got = compute(f"setp.{test}.f32 %p1, <0>, <1>; selp.b32 <d>, 1, 0, %p1;", [a, b], np.uint32)
    plain = {"lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b, "eq": a == b, "ne": a != b}
    nan = np.isnan(a) | np.isnan(b)
    expected = nan if test == "nan" else ~nan if test == "num" else plain[test[:2]] & ~nan | (nan & test.endswith("u"))
    assert got.tolist() == expected.astype(np.uint32).tolist()


def test_floats_to_integers_are_clipped_and_nan_is_zero() -> None:
    a = reals(4)
    got = compute("cvt.rzi.s32.f32 <d>, <0>;", [a], np.int32)
    expected = [0 if math.isnan(v) else int(min(max(v, -(2.0**31)), 2.0**31 - 1)) for v in map(float, a)]
    assert got.tolist() == expected


BF16, E4M3, E5M2 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def test_packing_two_bf16_puts_the_first_operand_high() -> None:
    a, b = reals(5), reals(6)
    got = compute("cvt.rn.bf16x2.f32 <d>, <0>, <1>;", [a, b], np.uint32).view(BF16).reshape(-1, 2)
    same(got[:, 1].astype(np.float32), a.astype(BF16).astype(np.float32))
    same(got[:, 0].astype(np.float32), b.astype(BF16).astype(np.float32))


@pytest.mark.parametrize(("kind", "dtype", "largest"), [("e4m3", E4M3, 448.0), ("e5m2", E5M2, 57344.0)])
def test_eight_bit_floats_saturate_and_come_back(kind: str, dtype: type, largest: float) -> None:
    a, b = reals(7), reals(8)
    got = compute(f"cvt.rn.satfinite.{kind}x2.f32 <d>, <0>, <1>;", [a, b], np.uint16)
    pairs = got.view(dtype).reshape(-1, 2).astype(np.float32)
    same(pairs[:, 1], np.clip(a, -largest, largest).astype(dtype).astype(np.float32))
    back = compute(f"cvt.rn.f16x2.{kind}x2 <d>, <0>;", [got], np.uint32)
    same(back.view(np.float16).reshape(-1, 2).astype(np.float32), pairs)


@pytest.mark.parametrize("operation", ["add", "mul", "min"])
def test_arithmetic_of_bf16(operation: str) -> None:
    a, b = (reals(seed).astype(BF16).view(np.uint16) for seed in (9, 10))
    x, y = (v.view(BF16).astype(np.float32) for v in (a, b))
    got = compute(f"{operation}.bf16 <d>, <0>, <1>;", [a, b], np.uint16).view(BF16).astype(np.float32)
    with np.errstate(all="ignore"):
        expected = {"add": x + y, "mul": x * y, "min": np.fmin(x, y)}[operation].astype(BF16).astype(np.float32)
    same(got, expected)


def test_conversions_between_halves() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)[::32].copy()
    same(compute("cvt.f32.bf16 <d>, <0>;", [bits], np.float32), bits.view(BF16).astype(np.float32))
    same(compute("cvt.f32.f16 <d>, <0>;", [bits], np.float32), bits.view(np.float16).astype(np.float32))
    a = reals(11)
    with np.errstate(all="ignore"):
        same(compute("cvt.rn.f16.f32 <d>, <0>;", [a], np.float16), a.astype(np.float16))
    finite = a[np.isfinite(a)][:192].copy()
    cut = (finite.view(np.uint32) & 0xFFFF0000).view(np.float32)
    same(compute("cvt.rz.bf16.f32 <d>, <0>;", [finite], np.uint16).view(BF16).astype(np.float32), cut)


@pytest.mark.parametrize(
    "text",
    [
        "add.cc.u32 <d>, <0>, <1>;",
        "add.rz.f32 <d>, <0>, <1>;",
        "dp4a.s32.s32 <d>, <0>, <1>, <0>;",
        "cvt.rn.ue8m0x2.f32 <d>, <0>, <1>;",
        "ld.local.b32 <d>, [%l1];",
    ],
)
def test_what_is_not_emulated_is_refused_by_name(text: str) -> None:
    with pytest.raises(PlancError, match="is not emulated") as caught:
        compute(text, [np.zeros(32, np.uint32)] * 2, np.uint32)
    assert text.split(" ")[0] in str(caught.value)
