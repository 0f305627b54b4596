"""Views keep the distance between tokens, or ask for a copy: a wrong stride would read another token's features."""

import pytest

from planc.compiler.ir.infer import reshape, slice_
from planc.compiler.ir.types import TensorType

WIDE = TensorType("f32", ("T", 960))


def view(start: int, stop: int) -> TensorType:
    return slice_({"axis": 1, "start": start, "stop": stop}, [WIDE])[0]


def test_a_slice_and_its_reshape_keep_the_row_stride() -> None:
    assert str(view(576, 768)) == "f32[T, 192]@strides:960"
    assert str(reshape({"shape": (-1, 3, 64)}, [view(576, 768)])[0]) == "f32[T, 3, 64]@strides:960,64"
    assert str(reshape({"shape": (-1, 15, 64)}, [WIDE])[0]) == "f32[T, 15, 64]"


def test_rows_with_gaps_ask_for_a_copy() -> None:
    heads = reshape({"shape": (-1, 20, 48)}, [WIDE])[0]
    part = slice_({"axis": 2, "start": 16, "stop": 32}, [heads])[0]
    assert part.strides() == (960, 48, 1)
    with pytest.raises(ValueError, match="copy it first"):
        reshape({"shape": (-1, 320)}, [part])


def test_one_feature_of_each_token_is_no_dense_vector() -> None:
    with pytest.raises(ValueError, match="copy it first"):
        reshape({"shape": (-1,)}, [view(3, 4)])
    one = TensorType("f32", ("T", 1))
    assert str(reshape({"shape": (-1,)}, [one])[0]) == "f32[T]"
