"""A model on the meta device and a checkpoint become a Binding: which checkpoint tensor each parameter reads.

Renames and the base-model prefix follow transformers' own loader (core_model_loading), so that a checkpoint means here
what it means to from_pretrained. Converters that build one parameter from several tensors are recognised and refused by
name for now; their place is `_renamed`.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from planc.compiler.ir.recipe import Recipe, load
from planc.compiler.refusal import refused
from planc.compiler.source.base import ModelSource
from planc.errors import PlancError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Binding:
    """Which checkpoint tensor each parameter reads, by the names of model.named_parameters().

    recipes: canonical parameter or persistent buffer -> how the checkpoint makes it, in the stored dtype. aliases: tied
    name -> canonical name. unused: checkpoint tensors that nothing reads, sorted.
    """

    recipes: dict[str, Recipe]
    aliases: dict[str, str]
    unused: list[str]

    def canonical(self, fqn: str) -> str:
        """The one name of a parameter that may have several."""
        return self.aliases.get(fqn, fqn)

    def recipe(self, fqn: str) -> Recipe:
        """How any of a parameter's names is made; KeyError if the checkpoint does not make it."""
        return self.recipes[self.canonical(fqn)]


def bind(model: nn.Module, source: ModelSource) -> Binding:
    """Matches every parameter of `model` (on meta) with a tensor of `source`.

    PlancError for missing tensors and wrong shapes names the first and the count.
    """
    state = model.state_dict()
    found = _renamed(model, source, state)
    aliases = tied_names(model)
    _check_tied(source, aliases, found)
    names: dict[str, str] = {}
    for fqn in state:
        if fqn in found:
            names.setdefault(aliases.get(fqn, fqn), found[fqn])
    _check_missing(model, source, [name for name, _ in model.named_parameters() if name not in names])
    _check_shapes(source, {name: tuple(state[name].shape) for name in names}, names)
    used = {found[fqn] for fqn in state if fqn in found}
    recipes = {name: load(tensor, *astuple(source.tensors[tensor])) for name, tensor in names.items()}
    return Binding(recipes, aliases, sorted(set(source.tensors) - used))


def tied_names(model: nn.Module) -> dict[str, str]:
    """Each further name of a shared parameter -> its first name in module order."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            aliases[name] = first[id(parameter)]
    return aliases


def _renamed(model: nn.Module, source: ModelSource, state: dict[str, Any]) -> dict[str, str]:
    """Parameter name -> checkpoint tensor, by transformers' renaming rules; the first tensor of a name counts."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    prefix = getattr(model, "base_model_prefix", "") or None
    found: dict[str, str] = {}
    for tensor in source.tensors:
        name, pattern = rename_source_key(tensor, renamings, converters, prefix, state)
        if pattern is not None:
            raise refused(f"{source.path}: tensor {tensor} must be merged into {name}, which is not supported yet")
        found.setdefault(name, tensor)
    return found


def _check_tied(source: ModelSource, aliases: dict[str, str], found: dict[str, str]) -> None:
    """from_pretrained would untie parameters whose tensors differ; a model that is traced already cannot be untied."""
    for name, canonical in aliases.items():
        first, second = found.get(canonical), found.get(name)
        if first is not None and second is not None and first != second and not _same(source, first, second):
            raise PlancError(
                f"{source.path}: the config ties {name} to {canonical}, and the tensors {second} and {first} differ. "
                'Set "tie_word_embeddings": false in config.json.'
            )


def _same(source: ModelSource, first: str, second: str) -> bool:
    if source.tensors[first] != source.tensors[second]:
        return False
    return bool(np.array_equal(source.read(first).view(np.uint8), source.read(second).view(np.uint8)))


def _check_missing(model: nn.Module, source: ModelSource, missing: list[str]) -> None:
    if missing:
        raise PlancError(
            f"{source.path} lacks {len(missing)} of the tensors that {type(model).__name__} needs, first {missing[0]}. "
            "Check that config.json and the weights belong together."
        )


def _check_shapes(source: ModelSource, expected: dict[str, tuple[int, ...]], names: dict[str, str]) -> None:
    wrong = [name for name, tensor in names.items() if source.tensors[tensor].shape != expected[name]]
    if wrong:
        tensor = names[wrong[0]]
        raise PlancError(
            f"{source.path}: {len(wrong)} tensors have a shape that the config does not imply, first {tensor}: "
            f"{list(source.tensors[tensor].shape)}, expected {list(expected[wrong[0]])}. "
            "Check that config.json and the weights belong together."
        )
