"""Which storage a weight gets: in go the default and what is said of single modules, out comes a scheme or a dtype."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from planc.compiler.ir.quant import SCHEMES, base, fitted
from planc.compiler.ir.recipe import Recipe, infer
from planc.errors import PlancError

PLAIN = ("bf16", "f32")
# Where a scheme would cost accuracy for few bytes, the part of the model that gets more bits: the head, whose rows are
# the logits; the router of experts, which decides; an embedding of its own, of which a step reads a few rows.
_WIDER: Mapping[str, Mapping[str, str]] = {
    "head": {"fp8": "bf16", "fp8-block": "bf16", "mxfp4": "bf16", "int4": "int8"},
    "router": {},
    "embedding": {},
}
_HEAD = "int8-wo"
_OTHER = "bf16"


@dataclass(frozen=True)
class QuantConfig:
    """`default` for all; `modules` maps patterns over the names of checkpoint tensors, the first that matches counts;
    `kinds` says it of the head, the embedding, the router. `native` are tensors that the checkpoint holds in a scheme,
    and stay so but in the kinds that were `asked` for otherwise.
    """

    default: str
    modules: tuple[tuple[str, str], ...] = ()
    kinds: Mapping[str, str] = field(default_factory=dict)
    native: Mapping[str, str] = field(default_factory=dict)
    asked: frozenset[str] = frozenset()

    @property
    def said(self) -> set[str]:
        """Every storage that is named, those of the checkpoint left out."""
        return {self.default, *self.kinds.values(), *(name for _, name in self.modules)}

    def of(self, recipe: Recipe, kind: str) -> str:
        """The scheme, its group fitted to the weight, or the dtype of a weight of a kind: head, router, embedding,
        linear or expert. PlancError names a weight that the scheme cannot hold.
        """
        loads = recipe.loads
        asked = self.kinds.get(kind) if kind in self.asked else None
        name = self._said(loads) or asked or self._held(loads) or self.kinds.get(kind) or self._usual(kind)
        if name not in SCHEMES or self._held(loads) == name:
            return name
        try:
            return fitted(name, int(infer(recipe).shape[-1]))
        except ValueError as e:
            raise PlancError(
                f"{loads[0]} cannot be stored as {name}: {e}. Give it another scheme in a --quant-config file."
            ) from e

    def _said(self, loads: tuple[str, ...]) -> str | None:
        """What the file says of the module; experts stacked from many tensors are asked by their first."""
        return next((name for pattern, name in self.modules if re.search(pattern, loads[0])), None)

    def _held(self, loads: tuple[str, ...]) -> str | None:
        held = {self.native.get(name) for name in loads}
        return held.pop() if len(held) == 1 else None

    def _usual(self, kind: str) -> str:
        if self.default in PLAIN or kind in ("linear", "expert"):
            return self.default
        return _WIDER[kind].get(base(self.default), _HEAD if kind == "head" else _OTHER)
