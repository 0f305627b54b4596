"""What every layout must show: floats that mean what was stored, parts that make them exactly, no trace of packing."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planc.compiler.ir.quant import SCHEMES
from planc.compiler.source import ModelSource, bind, new_model, open_source
from planc.compiler.source.base import DTYPES
from planc.errors import PlancError
from tests.compiler.source.quantized.checkpoints import replace, restate


def check_source(source: ModelSource, expected: Mapping[str, np.ndarray[Any, Any]], scheme: str | None) -> None:
    """Every tensor of `expected` reads bit for bit, in each of the ways of reading, and all are held by `scheme`, in
    which {} stands for the widest groups that divide K.
    """
    for name, floats in expected.items():
        read = source.read(name)
        assert source.tensors[name].shape == read.shape == floats.shape
        assert read.dtype == DTYPES[source.tensors[name].dtype]
        assert read.flags.writeable
        assert read.flags.c_contiguous
        np.testing.assert_array_equal(read.astype(np.float32), floats)
        np.testing.assert_array_equal(source.read_rows(name, 3, 9), read[3:9])
        np.testing.assert_array_equal(np.concatenate(list(source.read_pieces(name, 1000))), read.reshape(-1))
    widest = {
        name: max((g for g in (128, 64, 32) if floats.shape[-1] % g == 0), default=0)
        for name, floats in expected.items()
    }
    assert dict(source.native) == ({} if scheme is None else {n: scheme.format(widest[n]) for n in expected})
    check_parts(source)
    check_plain(source)


def check_refused(folder: Path, config: dict[str, Any], words: str) -> None:
    """A checkpoint that says this of its quantization does not open: one line with these words tells why."""
    restate(folder, config)
    with pytest.raises(PlancError) as caught:
        open_source(str(folder))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def check_missing(folder: Path, gone: str) -> None:
    """Without this tensor the checkpoint does not open, and the error names it."""
    replace(folder, lambda tensors: {name: t for name, t in tensors.items() if name != gone})
    with pytest.raises(PlancError, match=f"lacks the tensor {gone}"):
        open_source(str(folder))


def check_parts(source: ModelSource) -> None:
    """Parts are of the types that their scheme gives them, and make the floats, exactly where zero points are whole."""
    for name, scheme in source.native.items():
        row = SCHEMES[scheme]
        parts = {part: source.read(f"{name}:{part}") for part in row.parts}
        made = row.dequantize(*(parts[part] for part in row.parts))
        read = source.read(name).astype(np.float32)
        np.testing.assert_allclose(made, read, rtol=0, atol=0 if row.whole else 2e-6 * np.abs(read).max())
        for part, array in parts.items():
            info = source.tensors[f"{name}:{part}"]
            assert array.shape == info.shape
            assert array.dtype == DTYPES[info.dtype]
            assert array.size == prod(info.shape)
            np.testing.assert_array_equal(source.read_rows(f"{name}:{part}", 0, 1), array[:1])
        assert source.tensors[f"{name}:q"].dtype == row.codes


def check_plain(source: ModelSource) -> None:
    """transformers makes a model of floats of the config, which the source fills with nothing left over."""
    model = new_model(source.config())
    assert not hasattr(model.config, "quantization_config")
    binding = bind(model, source)
    assert binding.unused == []
    assert set(source.native) <= {load for recipe in binding.recipes.values() for load in recipe.loads}
