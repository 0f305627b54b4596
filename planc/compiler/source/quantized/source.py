"""A quantized checkpoint becomes a ModelSource of plain floats, beside which it shows the codes as they are stored."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from planc.compiler.source.base import PIECE, ModelSource, part_of
from planc.compiler.source.quantized.layout import Found
from planc.compiler.source.quantized.packed import NotFiniteError, Packed
from planc.errors import PlancError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_FIELDS = ("quantization_config", "compression_config")


class QuantizedSource(ModelSource):
    """`tensors` has each quantized weight under its plain name, and the parts of those in `native`; the tensors that
    they are made of are hidden.
    """

    def __init__(self, inner: ModelSource, found: Found) -> None:
        self._inner, self._packed = inner, found.weights
        self.name, self.path, self.trust_remote_code = inner.name, inner.path, inner.trust_remote_code
        self.notes = tuple(found.notes)
        self.native = {name: packed.scheme for name, packed in found.weights.items() if packed.scheme is not None}
        self.transposed = frozenset(name for name, packed in found.weights.items() if packed.transposed)
        self.tensors = {name: info for name, info in inner.tensors.items() if name not in found.hidden}
        for name, packed in found.weights.items():
            self.tensors[name] = packed.info
            self.tensors |= {f"{name}:{part}": info for part, info in packed.parts.items()}

    def config(self) -> PretrainedConfig:
        """The model's config as if it had never been quantized."""
        config = copy.deepcopy(self._inner.config())
        self.parent_type = self._inner.parent_type
        for part in (config, config.get_text_config()):
            for field in _FIELDS:
                if hasattr(part, field):
                    delattr(part, field)
        return config

    def read(self, name: str) -> np.ndarray[Any, Any]:
        plain, part = part_of(name)
        if plain not in self._packed:
            return self._inner.read(name)
        packed = self._packed[plain]
        return self._named(plain, lambda: packed.part(part) if part else packed.floats())

    def read_pieces(self, name: str, count: int = PIECE) -> Iterator[np.ndarray[Any, Any]]:
        if name not in self._packed:
            yield from super().read_pieces(name, count) if part_of(name)[1] else self._inner.read_pieces(name, count)
            return
        try:
            yield from self._packed[name].pieces(count)
        except NotFiniteError as e:
            raise self._broken(name, e) from None

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray[Any, Any]:
        plain, part = part_of(name)
        if plain not in self._packed:
            return self._inner.read_rows(name, start, stop)
        packed = self._packed[plain]
        if part and _first_axis_differs(packed, part):
            return self.read(name)[start:stop]
        return self._named(plain, lambda: packed.part(part, start, stop) if part else packed.floats(start, stop))

    def _named(self, name: str, make: Callable[[], np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        try:
            return make()
        except NotFiniteError as e:
            raise self._broken(name, e) from None

    def _broken(self, name: str, e: NotFiniteError) -> PlancError:
        return PlancError(f"{self.path}: tensor {name} is damaged: {e}. Fetch the checkpoint again.")

    def generation_config(self) -> dict[str, Any]:
        return self._inner.generation_config()

    def close(self) -> None:
        self._inner.close()


def _first_axis_differs(packed: Packed, part: str) -> bool:
    """Whether a part's first axis is not the tensor's: scales of [N, K] are [G, N]."""
    return part != "q" and len(packed.shape) == 2
