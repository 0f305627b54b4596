"""What every layout works with: the checkpoint's own tensors, checked by name, and what was found in them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from planc.compiler.source.base import ModelSource, TensorInfo
from planc.compiler.source.quantized.packed import Array, Packed
from planc.errors import PlancError

FLOATS = ("f16", "bf16", "f32")
_FETCH = "Fetch the checkpoint again, or use the unquantized model."


@dataclass
class Found:
    """Quantized tensors by their plain names, the tensors that they are made of, and what the build has to say."""

    weights: dict[str, Packed] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


class Stored:
    """The tensors as the checkpoint holds them."""

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self.path: Path = source.path

    def named(self, ending: str) -> list[str]:
        """What precedes `ending` in the names of the tensors that end so, sorted."""
        return sorted(name.removesuffix(ending) for name in self.source.tensors if name.endswith(ending))

    def has(self, name: str) -> bool:
        return name in self.source.tensors

    def info(self, name: str, dtypes: Collection[str], dims: int | None = None) -> TensorInfo:
        """What a tensor is; PlancError when it is missing, of another dtype or another number of axes."""
        if not self.has(name):
            raise PlancError(
                f"{self.path} lacks the tensor {name}, without which its module cannot be dequantized. {_FETCH}"
            )
        info = self.source.tensors[name]
        if info.dtype not in dtypes:
            raise PlancError(f"{self.path}: tensor {name} has dtype {info.dtype}, expected {' or '.join(dtypes)}.")
        if dims is not None and len(info.shape) != dims:
            raise self.misshapen(name, f"{dims} axes")
        return info

    def shaped(self, name: str, dtypes: Collection[str], shape: tuple[int, ...]) -> None:
        """PlancError unless the tensor is there, of one of the dtypes and of that shape."""
        if self.info(name, dtypes).shape != shape:
            raise self.misshapen(name, str(list(shape)))

    def misshapen(self, name: str, expected: str) -> PlancError:
        shape = list(self.source.tensors[name].shape)
        return PlancError(f"{self.path}: tensor {name} has shape {shape}, its module implies {expected}. {_FETCH}")

    def divided(self, name: str, k: int, group: int) -> int:
        """Groups of `group` in K columns; -1 is one group. PlancError when they do not come out even."""
        if group == -1:
            return 1
        if group < 1 or k % group:
            raise PlancError(
                f"{self.path}: {name} has {k} input channels, which groups of {group} do not divide. "
                "Use the unquantized model."
            )
        return k // group

    def read(self, name: str) -> Array:
        return self.source.read(name)

    def rows(self, name: str, start: int, stop: int) -> Array:
        return self.source.read_rows(name, start, stop)

    def wide(self, name: str) -> Array:
        """A small tensor of floats in float32."""
        return np.asarray(self.source.read(name), np.float32)


def check_fields(
    path: Path, method: str, stated: Mapping[str, Any], known: Mapping[str, Collection[Any] | None]
) -> None:
    """PlancError for a field of a quantization_config that is not in `known`, or has a value that is not among its own
    (None allows any). A field that is null counts as absent.
    """
    for name, value in stated.items():
        if value is None:
            continue
        if name not in known:
            raise PlancError(
                f"{path}: the quantization_config ({method}) has the field {name} = {_brief(value)}, which planc does "
                f"not know and will not ignore. It knows {', '.join(sorted(known))}."
            )
        allowed = known[name]
        if allowed is not None and value not in allowed:
            raise PlancError(
                f"{path}: the quantization_config ({method}) has {name} = {_brief(value)}; planc reads "
                f"{_listed(allowed)}. Use the unquantized model."
            )


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _listed(values: Iterable[Any]) -> str:
    return " or ".join(repr(value) for value in values) or "no value of it"
