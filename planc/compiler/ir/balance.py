"""Keys whose features are of like size, for caches whose codes are at equal steps: in go the weights of the norms that
keys and queries have before they turn, out come both with factors that leave every score as it is.

A code's step is a share of a key's largest feature, and what rounding takes from feature i counts as often as the query
has of i. Where a few features are large by their norm's weight, the others have hardly a digit left. Factors are powers
of two, so that products of floats keep every bit; the two features of a pair that turns have one.
"""

from collections.abc import Mapping

import numpy as np

from planc.compiler.ir.types import Attr

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the unevenness of keys that factors take
_PEAK = 8  # the norm that stands for the largest of a key's features
_BETTER = 0.98  # of the noise: a larger share is taken that leaves less, and another sweep is made
_SWEEPS = 8


def balanced(keys: np.ndarray, queries: np.ndarray, attrs: Mapping[str, Attr]) -> np.ndarray:
    """f32[D]: the weight of the keys' norm divided by the factors, or that of the queries' times them (attr `of`).

    Attrs `half` (pairs that turn) and `interleaved` are those of the rotation.
    """
    s = factors(keys, queries, int(attrs["half"]), bool(attrs["interleaved"]))  # type: ignore[arg-type]
    return np.asarray(keys / s if attrs["of"] == "keys" else queries * s, np.float32)


def factors(keys: np.ndarray, queries: np.ndarray, half: int, interleaved: bool) -> np.ndarray:
    """f32[D], powers of two: those among SHARES that leave the least noise in scores."""
    size = np.maximum(np.abs(keys.astype(np.float64)), 1e-30)
    pairs = _pairs(len(keys), half, interleaved)
    size[pairs] = size[pairs].max(axis=1, keepdims=True)
    uneven = np.log2(size / np.median(size))
    best, least = np.ones(len(keys)), np.inf
    for share in SHARES:
        s = np.exp2(np.clip(np.rint(share * uneven), -16, 16))
        noise = _noise(keys, queries, s)
        if noise < least * _BETTER:
            best, least = s, noise
    alone = np.setdiff1d(np.arange(len(keys)), pairs)[:, None]
    return _refined(keys, queries, best, [*pairs, *alone]).astype(np.float32)


def _refined(keys: np.ndarray, queries: np.ndarray, s: np.ndarray, groups: list[np.ndarray]) -> np.ndarray:
    """Doubles or halves the factors of single groups of features while that leaves less noise."""
    least = _noise(keys, queries, s)
    for _ in range(_SWEEPS):
        before = least
        for group in groups:
            for times in (2.0, 0.5):
                changed = s.copy()
                changed[group] *= times
                noise = _noise(keys, queries, changed)
                if noise < least * (1 - 1e-6):  # what the order of additions changes must not count
                    s, least = changed, noise
        if least > before * _BETTER:
            break
    return s


def _pairs(d: int, half: int, interleaved: bool) -> np.ndarray:
    """i64[half, 2]: the features that turn together."""
    first = np.arange(half) * (2 if interleaved else 1)
    return np.stack([first, first + (1 if interleaved else half)], axis=1)


def _noise(keys: np.ndarray, queries: np.ndarray, s: np.ndarray) -> float:
    """The square of a step times the sum of what it counts in scores, for keys / s and queries * s."""
    peak = ((keys / s) ** _PEAK).sum() ** (2 / _PEAK)
    return float(peak * np.square(queries * s, dtype=np.float64).sum())
