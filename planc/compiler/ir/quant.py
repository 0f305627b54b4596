"""Quantization schemes as rows: in goes W[.., N, K], out come its parts (codes, scales, zero points), pure numpy.

    w[n, k] ~ (q[n, k] - z) * s

Scales and zero points belong to an output channel ([.., N]), to a group of neighbours in K ([.., K/g, N]), or to a
block of 128 x 128, whose one scale is written out for each of its channels ([.., K/128, N]): kernels know one form.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from planc.compiler.ir.hadamard import rotate
from planc.compiler.ir.types import DTYPES, Dim, TensorType

GROUPS = (128, 64, 32)
BLOCK = 128
_ELEMENTS = 1 << 17  # widened to float32 at a time: bounds the memory of quantizing a large weight
LIMITS: Mapping[str, float] = {"i8": 127, "f8e4m3": 448, "f8e3m4": 15.5, "u4": 15}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclass(frozen=True)
class Scheme:
    """One row. `codes` is the dtype of the codes, `group` how many k share a scale (None: all of a channel's), `blocks`
    that 128 channels share it too, `zeros` that each group has a zero point, `whole` that those are whole numbers,
    `offset` the zero point of all where it is one number, `act` the dtype that activations are rounded to, a scale a
    token, or one for each group of it (`by_group`); None leaves them as they are. Rows and weights of a scheme that
    `turns` turn before they are rounded (hadamard.py): codes at equal steps gain by it, those of floats lose. `scales`
    is the dtype of scales and zero points where they are made here; what checkpoints hold stays f32.

    A scheme that is `read_only` is what checkpoints hold, and nothing is quantized to it.
    """

    name: str
    codes: str
    group: int | None = None
    blocks: bool = False
    zeros: bool = False
    whole: bool = True
    offset: int = 0
    act: str | None = None
    by_group: bool = False
    turns: bool = False
    scales: str = "f32"
    read_only: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts, in the order of the inputs of an op."""
        return ("q", "s", "z") if self.zeros else ("q", "s")

    @property
    def scale_bits(self) -> float:
        """Bits of scales and zero points a code of a group, as they are made here; of a channel none count."""
        return 8 * DTYPES[self.scales].itemsize * len(self.parts[1:]) / self.group if self.group else 0.0

    @property
    def rows_group(self) -> int | None:
        """How many features of a row share a scale where it has one for each group."""
        return self.group if self.by_group else None

    @property
    def is_float(self) -> bool:
        """Whether codes are floats, each rounded to a share of itself."""
        return self.codes.startswith("f8")

    @property
    def limit(self) -> int:
        """The largest code."""
        return int(LIMITS[self.codes])

    def part_type(self, w: TensorType, part: str, outliers: int = 0, *, held: bool = False) -> TensorType:
        """Type of a part of a weight of type `w`, of which so many features are kept to two digits; `held` by a
        checkpoint, or made here.
        """
        if part not in self.parts:
            raise ValueError(f"scheme {self.name} has parts {' and '.join(self.parts)}, not {part!r}")
        if outliers and not (self.is_float and self.group is None):
            raise ValueError(f"scheme {self.name} keeps no features to two digits: it has no float codes by channel")
        if part == "q":
            *rest, k = w.shape
            return TensorType(self.codes, (*rest, int(k) + 2 * outliers) if outliers else w.shape)
        return TensorType("f32" if held else self.scales, self._scales_shape(w.shape))

    def axis(self, part: str, axis: int, ndim: int) -> int | None:
        """The axis of a part that is `axis` of a weight with `ndim` axes; None where K is shared out in groups."""
        if part == "q" or axis < ndim - 2:
            return axis
        if axis == ndim - 1:
            return None
        return ndim - 2 if self.group is None else ndim - 1

    def part(
        self,
        w: np.ndarray,
        part: str,
        clip: np.ndarray | None = None,
        hadamard: int = 1,
        outliers: np.ndarray | None = None,
    ) -> np.ndarray:
        """The array of `part`; ValueError when the weight holds NaN or infinity.

        `clip`, of the shape of the scales, bounds |w| before its range is found; of codes that are floats it is the
        range, and may be wider than the weight. The weight turns along K in blocks of
        `hadamard` first, as the rows do that it multiplies. Behind the K codes of a channel stand those of its
        `outliers` again, for the second digit of the rows, and then its own second digit of these.
        """
        if self.read_only:
            raise ValueError(f"nothing is quantized to {self.name}: it is read from checkpoints that hold it")
        made = self.part_type(TensorType("f32", w.shape), part, 0 if outliers is None else len(outliers))
        out = np.empty(made.shape, DTYPES[made.dtype])  # type: ignore[type-var]
        for at in np.ndindex(*w.shape[:-2]):
            self._fill(w[at], part, out[at], None if clip is None else clip[at], hadamard, outliers)
        return out

    def dequantize(self, q: np.ndarray, s: np.ndarray, z: np.ndarray | None = None) -> np.ndarray:
        """float32 W[.., N, K] from its parts."""
        wide = E2M1[q] if self.name == "mxfp4" else q.astype(np.float32)
        if z is not None:
            wide -= self._spread(z.astype(np.float32), q.shape[-1])
        elif self.offset:
            wide -= np.float32(self.offset)
        wide *= self._spread(s.astype(np.float32), q.shape[-1])
        return wide

    def folded(self, wide: np.ndarray, outliers: np.ndarray | None) -> np.ndarray:
        """W[.., N, K] that dequantized codes stand for: the second digits of its outliers go to the first."""
        if outliers is None:
            return wide
        count = len(outliers)
        out = wide[..., : wide.shape[-1] - 2 * count].copy()
        out[..., outliers] += wide[..., wide.shape[-1] - count :]
        return out

    def _scales_shape(self, shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
        *stack, n, k = shape
        return (*stack, n) if self.group is None else (*stack, -(-int(k) // self.group), n)

    def _spread(self, s: np.ndarray, k: int) -> np.ndarray:
        """Scales as they multiply [.., N, K]: broadcast over a channel, or repeated over each group."""
        if self.group is None:
            return s[..., None]
        return np.repeat(s.swapaxes(-1, -2), self.group, axis=-1)[..., :k]

    def _fill(
        self,
        w: np.ndarray,
        part: str,
        out: np.ndarray,
        clip: np.ndarray | None,
        hadamard: int,
        outliers: np.ndarray | None,
    ) -> None:
        """One matrix, some rows at a time."""
        for rows in self._rows(w):
            wide = rotate(w[rows], hadamard)
            mine = (..., rows)
            s, z = self._scales(wide, None if clip is None else clip[mine])
            if part == "q":
                out[rows] = self._codes(wide, s, z) if outliers is None else self._digits(wide, s, outliers)
            else:
                out[mine] = s if part == "s" else z

    def _rows(self, w: np.ndarray) -> Iterator[slice]:
        step = max(1, _ELEMENTS // w.shape[1])
        step = max(step // BLOCK * BLOCK, BLOCK) if self.blocks else step
        for i in range(0, len(w), step):
            yield slice(i, min(i + step, len(w)))

    def _scales(self, rows: np.ndarray, clip: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """Scales and zero points of some channels: [n] or [K/g, n]."""
        low, high = self._range(rows)
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise ValueError(f"scheme {self.name}: the weight holds NaN or infinity, nothing to scale by")
        if clip is not None:
            low, high = (-clip, clip) if self.is_float else (np.maximum(low, -clip), np.minimum(high, clip))
        if self.zeros:
            s = self._kept((high - low) / np.float32(self.limit))
            return s, np.clip(np.rint(-low / _divisor(s)), 0, self.limit)  # beyond it where a tiny scale is rounded
        if self.offset:  # the extreme itself is the code 0, so that all codes are used
            extreme = np.where(-low >= high, low, high)
            return self._kept(extreme / np.float32(-self.offset)), None
        return self._kept(np.maximum(-low, high) / np.float32(self.limit)), None

    def _kept(self, s: np.ndarray) -> np.ndarray:
        """Scales as they will be stored, in f32: codes are rounded by these."""
        return np.asarray(s, DTYPES[self.scales]).astype(np.float32)

    def _range(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Least and greatest of each channel, group or block, zero included. NaN and infinity stay."""
        if self.group is None:
            return np.minimum(rows.min(axis=1), 0), np.maximum(rows.max(axis=1), 0)
        starts = np.arange(0, rows.shape[1], self.group)
        low = np.minimum(np.minimum.reduceat(rows, starts, axis=1), 0)
        high = np.maximum(np.maximum.reduceat(rows, starts, axis=1), 0)
        if self.blocks:
            first = np.arange(0, len(rows), BLOCK)
            low = np.repeat(np.minimum.reduceat(low, first), BLOCK, axis=0)[: len(rows)]
            high = np.repeat(np.maximum.reduceat(high, first), BLOCK, axis=0)[: len(rows)]
        return low.T, high.T

    def _digits(self, rows: np.ndarray, s: np.ndarray, outliers: np.ndarray) -> np.ndarray:
        """Codes of channels, those of their outliers again, and codes of what rounding took from these."""
        first = self._codes(rows, s, None)
        again = first[:, outliers]
        left = rows[:, outliers] - again.astype(np.float32) * self._spread(s, len(outliers))
        return np.concatenate([first, again, self._codes(left, s, None)], axis=1)

    def _codes(self, rows: np.ndarray, s: np.ndarray, z: np.ndarray | None) -> np.ndarray:
        ratio = rows / self._spread(_divisor(s), rows.shape[1])
        if self.codes == "f8e4m3":
            return np.clip(ratio, -self.limit, self.limit).astype(DTYPES[self.codes])
        if self.codes == "i8":
            np.rint(ratio, out=ratio)
            return np.clip(ratio, -self.limit, self.limit, out=ratio).astype(np.int8)
        zero = np.float32(self.offset) if z is None else self._spread(z, rows.shape[1])
        return np.clip(np.rint(ratio) + zero, 0, self.limit).astype(np.uint8)


def _divisor(s: np.ndarray) -> np.ndarray:
    return np.where(s == 0, np.float32(1), s)


_ROWS = (
    Scheme("int8", "i8", act="i8", turns=True),
    Scheme("int8-wo", "i8"),
    Scheme("fp8", "f8e4m3", act="f8e4m3"),
    Scheme("fp8-block", "f8e4m3", group=BLOCK, blocks=True, act="f8e4m3"),
    Scheme("int4-wo", "u4", group=GROUPS[0], offset=8, scales="bf16"),
    Scheme("awq", "u4", group=GROUPS[0], zeros=True, scales="bf16"),
    Scheme("int4", "u4", group=GROUPS[0], zeros=True, act="i8", by_group=True, scales="bf16"),
    Scheme("mxfp4", "u4", group=32, read_only=True),
    # Blocks of GGUF files, those of 5 and 6 bits in codes of 8.
    Scheme("q4_1", "u4", group=32, zeros=True, whole=False, read_only=True),
    Scheme("q8_0", "i8", group=32, read_only=True),
    Scheme("q6_k", "i8", group=16, read_only=True),
)
_GROUPED = ("int4-wo", "awq", "int4")  # those that have a row for each group size: `awq-g64`
SCHEMES: Mapping[str, Scheme] = {row.name: row for row in _ROWS} | {
    f"{row.name}-g{g}": replace(row, name=f"{row.name}-g{g}", group=g)
    for row in _ROWS
    if row.name in _GROUPED
    for g in GROUPS
}


def scheme(name: str) -> Scheme:
    """The row of a name; KeyError lists what there is."""
    if name not in SCHEMES:
        raise KeyError(f"no quantization scheme {name!r}; there are {', '.join(SCHEMES)}")
    return SCHEMES[name]


def base(name: str) -> str:
    """A scheme's name without its group size."""
    return re.sub(r"-g\d+$", "", name)


def fitted(name: str, k: int) -> str:
    """The scheme for a weight of K input channels, its group spelt out: the asked size, or the next smaller that
    divides K. ValueError when none does.
    """
    row, plain = scheme(name), base(name)
    if plain not in _GROUPED:
        return name
    assert row.group is not None
    sizes = [g for g in GROUPS if g <= row.group and k % g == 0]
    if not sizes:
        tried = ", ".join(str(g) for g in GROUPS if g <= row.group)
        raise ValueError(f"no group size of {name} ({tried}) divides its {k} input channels")
    return f"{plain}-g{sizes[0]}"


def quantize_rows(
    x: np.ndarray,
    dtype: str,
    hadamard: int = 1,
    shift: np.ndarray | None = None,
    outliers: np.ndarray | None = None,
    group: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Codes [.., K] and scales f32 [..] of activations: each row by its own largest magnitude, a zero row by 0, after
    `shift` [K] was taken from it and it has turned in blocks of `hadamard`. With a `group`, so many neighbours
    have a scale each, [.., K/group].

    Behind them, for `outliers` [n], features that are kept to two digits: codes of what rounding took from these, then
    their codes again, which meet the second digit of the weight (Scheme.part).
    """
    x = rotate(x if shift is None else x - shift, hadamard)
    if group is not None:
        codes, scale = quantize_rows(x.reshape(*x.shape[:-1], -1, group), dtype)
        return codes.reshape(x.shape), scale
    limit = np.float32(LIMITS[dtype])
    scale = np.asarray(np.abs(x).max(axis=-1) / limit, np.float32)
    ratio = np.clip(x / _divisor(scale)[..., None], -limit, limit)
    codes = (np.rint(ratio) if dtype == "i8" else ratio).astype(DTYPES[dtype])
    if outliers is not None:
        again = codes[..., outliers]
        left = (ratio[..., outliers] - again.astype(np.float32)).astype(DTYPES[dtype])
        codes = np.concatenate([codes, left, again], axis=-1)
    return codes, scale
