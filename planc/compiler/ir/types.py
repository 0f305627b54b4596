"""The types of the graph: in go a dtype name, a shape and a layout, out comes what a value is and its bytes."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import ml_dtypes
import numpy as np

Dim = int | str
Attr = int | float | bool | str | tuple[int, ...]

SYMBOLS = {
    "T": "tokens in this step",
    "S": "sequences in this step",
    "S1": "S + 1",
    "R": "rows whose logits are wanted",
    "P": "KV pages",
    "M": "pages a sequence",
}

# Name -> numpy storage dtype. The names are those of the text form.
DTYPES: dict[str, np.dtype] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f8e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "f8e3m4": np.dtype(ml_dtypes.float8_e3m4),
    "i8": np.dtype(np.int8),
    "u4": np.dtype(np.uint8),  # one code 0..15 a byte, until it is packed
    "u8": np.dtype(np.uint8),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "bool": np.dtype(np.bool_),
}
_NAMES = {v: k for k, v in DTYPES.items()}


def dtype_name(dtype: np.dtype) -> str:
    """The graph's name of a numpy dtype; KeyError names one that the graph does not know."""
    if dtype not in _NAMES:
        raise KeyError(f"numpy dtype {dtype} has no name in the graph; known: {', '.join(DTYPES)}")
    return _NAMES[dtype]


@dataclass(frozen=True)
class TensorType:
    """What a value is: a dtype of `DTYPES`, a shape of ints and symbols, a layout.

    Layouts: `row` is dense row-major; `strides:a,b` gives the strides, in elements, of every axis but the innermost,
    whose stride is 1 (a view into a wider buffer); `n64`, `n64k2`, `n64k4`, `n64u4`, `n64k8`, `k2` are the packed
    layouts of linear weights, where `shape` stays the logical (N, K), or (E, N, K) for a stack of experts.
    """

    dtype: str
    shape: tuple[Dim, ...]
    layout: str = "row"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}; known: {', '.join(DTYPES)}")
        for d in self.shape:
            if isinstance(d, str) and d not in SYMBOLS:
                raise ValueError(f"unknown symbol {d!r} in shape {self.shape}; known: {', '.join(SYMBOLS)}")

    def __str__(self) -> str:
        dims = ", ".join(str(d) for d in self.shape)
        return f"{self.dtype}[{dims}]" + ("" if self.layout == "row" else f"@{self.layout}")

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize

    @property
    def features(self) -> int:
        """Elements of one row: the product of every axis but the first."""
        return prod(int(d) for d in self.shape[1:])

    def strides(self) -> tuple[int, ...]:
        """Strides in elements of every axis; the shape past the first axis must be concrete."""
        if self.layout.startswith("strides:"):
            return (*(int(s) for s in self.layout.removeprefix("strides:").split(",")), 1)
        if self.layout != "row":
            raise ValueError(f"a packed tensor {self} has no strides")
        out = [1]
        for d in reversed(self.shape[1:]):
            out.append(out[-1] * int(d))
        return tuple(reversed(out))[-len(self.shape) :] if self.shape else ()

    def extent(self, dims: Mapping[str, int]) -> int:
        """Bytes from the first element to the end of the last one, of a value that is not packed."""
        shape = [dims[d] if isinstance(d, str) else d for d in self.shape]
        return (sum((n - 1) * s for n, s in zip(shape, self.strides(), strict=True)) + 1) * self.itemsize

    def nbytes(self, dims: Mapping[str, int] | None = None) -> int:
        """Bytes of the tensor, padding of packed layouts included; symbols come from `dims` (KeyError if absent)."""
        shape = [d if isinstance(d, int) else (dims or {})[d] for d in self.shape]
        if self.layout in PACKED:
            *stack, n, k = shape
            step, channels = PACKED[self.layout], 1 if self.layout == PAIRS else 64
            shape = [*stack, -(-n // channels) * channels, -(-k // step) * step // (2 if self.dtype == "u4" else 1)]
        return prod(shape) * self.itemsize


# Packed weight layouts of linear layers and how many neighbours in K lie together: 64 output channels a block, or rows
# as they are whose codes of 4 bits share bytes in pairs.
PAIRS = "k2"
PACKED = {"n64": 1, "n64k2": 2, "n64k4": 4, "n64u4": 4, "n64k8": 8, PAIRS: 2}
PACKED_FOR = {"f32": "n64", "bf16": "n64k2", "i8": "n64u4", "f8e4m3": "n64k4", "u4": "n64k8"}
