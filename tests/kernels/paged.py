"""A paged cache for tests: in go a layer's geometry and lengths, out come a cache and scattered pages."""

from dataclasses import dataclass

import numpy as np

from planc.compiler.ir.types import DTYPES, Attr


@dataclass(frozen=True)
class Shape:
    """The geometry of one attention layer. `pad` moves the layer inside its page."""

    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    block: int = 16
    dtype: str = "f32"
    pad: int = 128

    @property
    def cache(self) -> dict[str, Attr]:
        attrs: dict[str, Attr] = {
            "layer": 0,
            "heads": self.kv_heads,
            "k_dim": self.k_dim,
            "v_dim": self.v_dim,
            "block": self.block,
            "dtype": self.dtype,
        }
        at = self.pad
        for name, dim in (("k", self.k_dim), ("v", self.v_dim)):
            attrs[f"{name}_offset"] = at
            at = -(-(at + self.kv_heads * dim * self.block * DTYPES[self.dtype].itemsize) // 64) * 64
            if self.dtype in ("i8", "f8e3m4", "f8e4m3"):
                attrs[f"{name}_scale_offset"] = at
                at += self.kv_heads * self.block * 4
        return attrs | {"page_bytes": at + 64}


def page_table(lengths: list[int], block: int, seed: int = 0) -> tuple[np.ndarray, int]:
    """i32[S, M] of shuffled pages for sequences of these lengths, and the page count of the cache."""
    counts = [-(-n // block) for n in lengths]
    pages = np.random.default_rng(seed).permutation(sum(counts) + 3).astype(np.int32)
    table = np.full((len(lengths), max(counts) + 1), 2**30, np.int32)  # past a sequence's end: far outside the cache
    at = 0
    for s, n in enumerate(counts):
        table[s, :n] = pages[at : at + n]
        at += n
    return table, len(pages)


def empty_cache(shape: Shape, pages: int) -> np.ndarray:
    """u8[P, page_bytes] whose every element is a NaN, 64-byte aligned."""
    nbytes = int(shape.cache["page_bytes"])
    raw = np.full(pages * nbytes + 64, 0xFF, np.uint8)
    start = (-raw.ctypes.data) % 64
    return raw[start : start + pages * nbytes].reshape(pages, nbytes)


def slots(table: np.ndarray, seq: int, positions: np.ndarray, block: int) -> np.ndarray:
    return (table[seq, positions // block] * block + positions % block).astype(np.int32)
