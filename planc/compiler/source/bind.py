"""A model on the meta device and a checkpoint become a Binding: how each parameter is made of the checkpoint's tensors.

Names, fused tensors and the base-model prefix follow transformers' own loader (convert.py), so that a checkpoint means
here what it means to from_pretrained. Tensors of a multimodal model's language model are found below their parent's
prefix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from planc.compiler.ir.recipe import Recipe, evaluate, infer
from planc.compiler.source.base import ModelSource
from planc.errors import PlancError

if TYPE_CHECKING:
    from torch import nn

_BELONG = "Check that config.json and the weights belong together."


@dataclass(frozen=True)
class Binding:
    """How the checkpoint makes each parameter, by the names of model.named_parameters().

    recipes: canonical parameter or persistent buffer -> how the checkpoint makes it, in the stored dtype. aliases: tied
    name -> canonical name. untied: names that the config ties, and the checkpoint holds with values of their own.
    unused: checkpoint tensors that nothing reads, sorted.
    """

    recipes: dict[str, Recipe]
    aliases: dict[str, str]
    untied: list[str]
    unused: list[str]

    def canonical(self, fqn: str) -> str:
        """The one name of a parameter that may have several."""
        return self.aliases.get(fqn, fqn)

    def recipe(self, fqn: str) -> Recipe:
        """How any of a parameter's names is made; KeyError if the checkpoint does not make it."""
        return self.recipes[self.canonical(fqn)]


def bind(model: nn.Module, source: ModelSource) -> Binding:
    """Makes every parameter of `model` (on meta) from tensors of `source`.

    As from_pretrained does, it unties parameters of `model` whose tensors differ. PlancError for missing tensors and
    wrong shapes names the first and the count.
    """
    found = _complete(model, source)
    untied = _untie(model, source, found)
    aliases = tied_names(model)
    recipes: dict[str, Recipe] = {}
    for fqn, recipe in found.items():
        recipes.setdefault(aliases.get(fqn, fqn), recipe)
    _check_missing(model, source, _missing(model, found))
    _check_shapes(source, {fqn: tuple(t.shape) for fqn, t in model.state_dict().items()}, recipes)
    used = {name for recipe in found.values() for name in recipe.loads}
    return Binding(recipes, aliases, untied, sorted(set(source.plain_names) - used))


def tied_names(model: nn.Module) -> dict[str, str]:
    """Each further name of a shared parameter -> its first name in module order."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            aliases[name] = first[id(parameter)]
    return aliases


def _complete(model: nn.Module, source: ModelSource) -> dict[str, Recipe]:
    """State name -> recipe: of the tensors' own names, or of those below a parent's prefix if only that is complete."""
    from planc.compiler.source.convert import convert

    found = convert(model, source, {name: name for name in source.plain_names})
    if _missing(model, found):
        for names in unwrapped(model, source):
            inner = convert(model, source, names)
            if not _missing(model, inner):
                return inner
    return found


def _missing(model: nn.Module, found: dict[str, Recipe]) -> list[str]:
    aliases = tied_names(model)
    made = {aliases.get(name, name) for name in found}
    return [name for name, _ in model.named_parameters() if name not in made]


def unwrapped(model: nn.Module, source: ModelSource) -> Iterator[dict[str, str]]:
    """Maps from the names that the model itself would use to those of a parent (`language_model.model.norm.weight`).

    The embedding's name tells how the parent calls the base model; a head lies beside that or beside what is around it.
    """
    state = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    embedding = _embedding(model)
    if embedding is None:
        return
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    base = prefix if embedding.startswith(prefix) else ""
    tail = embedding.removeprefix(base)
    for tensor, info in source.tensors.items():
        if tensor.endswith(f".{tail}") and tensor != embedding and info.shape == state[embedding]:
            parent = tensor.removesuffix(tail)
            names = {base + t.removeprefix(parent): t for t in source.plain_names if t.startswith(parent)}
            yield {**_beside(source, parent, [n for n in state if not base or not n.startswith(base)]), **names}


def _embedding(model: nn.Module) -> str | None:
    """The name of the weight of the input embedding."""
    module = model.get_input_embeddings()  # type: ignore[operator]
    return next((f"{path}.weight" for path, found in model.named_modules() if found is module), None)


def _beside(source: ModelSource, parent: str, heads: list[str]) -> dict[str, str]:
    """Names outside of the base model -> tensors that lie beside `parent`, or beside what is nearest around it."""
    path = parent.removesuffix(".").split(".")
    around = [".".join([*path[:depth], ""]) for depth in range(len(path) - 1, -1, -1)]
    found = {name: next((a + name for a in around if a + name in source.tensors), None) for name in heads}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _untie(model: nn.Module, source: ModelSource, found: dict[str, Recipe]) -> list[str]:
    """Gives a parameter of its own to each tied name that the checkpoint holds with other values; returns the names."""
    import torch

    untied = []
    for name, canonical in tied_names(model).items():
        first, second = found.get(canonical), found.get(name)
        if first is None or second is None or _same(source, first, second):
            continue
        path, _, own = name.rpartition(".")
        setattr(model.get_submodule(path), own, torch.nn.Parameter(torch.empty_like(model.get_parameter(name))))
        untied.append(name)
    return untied


def _same(source: ModelSource, first: Recipe, second: Recipe) -> bool:
    if first == second or infer(first) != infer(second):
        return first == second
    one, other = (np.ascontiguousarray(evaluate(recipe, source.read, {})) for recipe in (first, second))
    return bool(np.array_equal(one.view(np.uint8), other.view(np.uint8)))


def _check_missing(model: nn.Module, source: ModelSource, missing: list[str]) -> None:
    if missing:
        raise PlancError(
            f"{source.path} lacks {len(missing)} of the tensors that {type(model).__name__} needs, first {missing[0]}. "
            f"{_BELONG}"
        )


def _check_shapes(source: ModelSource, expected: dict[str, tuple[int, ...]], recipes: dict[str, Recipe]) -> None:
    wrong = [name for name, recipe in recipes.items() if infer(recipe).shape != expected[name]]
    if wrong:
        loads = recipes[wrong[0]].loads
        made = loads[0] if recipes[wrong[0]].op == "load" else f"{wrong[0]} ({len(loads)} tensors, first {loads[0]})"
        raise PlancError(
            f"{source.path}: {len(wrong)} tensors have a shape that the config does not imply, first {made}: "
            f"{list(infer(recipes[wrong[0]]).shape)}, expected {list(expected[wrong[0]])}. {_BELONG}"
        )
