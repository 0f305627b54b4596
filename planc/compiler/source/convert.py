"""transformers' weight conversion rules and a checkpoint's table of tensors become recipes, one a parameter.

transformers' own code does the converting (core_model_loading: renames, then at most one converter a tensor), on
tensors without values whose moves are written down: what a rule stacks, splits or transposes becomes a recipe, what it
computes is refused. So a checkpoint means here what it means to from_pretrained, without a table of rules to keep up.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planc.compiler.ir.recipe import Recipe, load, step
from planc.compiler.ir.types import DTYPES
from planc.compiler.refusal import refused
from planc.compiler.source.base import ModelSource, TensorInfo, one_line
from planc.compiler.source.moves import MOVES, TORCH, UnknownMoveError
from planc.errors import PlancError

if TYPE_CHECKING:
    from torch import nn


_FLOATS = ("f32", "f16", "bf16")


class Recorder(TorchDispatchMode):
    """While it is open, moves of the tensors that `tensor` gave out are written down as recipes."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[torch.Tensor, Recipe]] = {}  # the tensor is kept, so that no id is used twice

    def tensor(self, name: str, info: TensorInfo, transposed: bool = False) -> torch.Tensor:
        """A tensor without values that stands for a tensor of the checkpoint, or for its transpose."""
        made, recipe = (
            torch.empty(info.shape, dtype=TORCH[info.dtype], device="meta"),
            load(name, info.dtype, info.shape),
        )
        if transposed:
            made = made.mT.contiguous()
            recipe = step("transpose", recipe, perm=(*range(made.dim() - 2), made.dim() - 1, made.dim() - 2))
        self._known[id(made)] = (made, recipe)
        return made

    def recipe(self, tensor: torch.Tensor) -> Recipe | None:
        """How a tensor was made; None if not from tensors of the checkpoint alone."""
        return self._known[id(tensor)][1] if id(tensor) in self._known else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        known = [id(t) in self._known for t in given]
        if any(known) and (func not in MOVES or not all(known)):
            raise UnknownMoveError(str(func).removeprefix("aten."))
        out = func(*args, **kwargs)
        if any(known):
            inputs = [self._known[id(t)][1] for t in given]
            made = MOVES[func](inputs, out, *args[1:])
            for value, recipe in zip(out if isinstance(out, (list, tuple)) else [out], made, strict=True):
                self._known[id(value)] = (value, recipe)
        return out


def convert(model: nn.Module, source: ModelSource, names: Mapping[str, str]) -> dict[str, Recipe]:
    """Name in `model.state_dict()` -> recipe, for all that the checkpoint makes; shapes are not checked.

    `names` maps each tensor's name as the rules are to see it to its name in the checkpoint. PlancError names the
    tensor and the operation of a conversion that is more than a move.
    """
    state = model.state_dict()
    recorder = Recorder()
    found: dict[str, Recipe] = {}
    for first, (mapping, tensors) in _collected(model, source, names, state, recorder).items():
        for target, tensor in _converted(first, mapping, tensors, model, source, recorder).items():
            if target in state:
                found[target] = _recipe(recorder, tensor, target, tensors, source)
    return found


def _collected(
    model: nn.Module, source: ModelSource, names: Mapping[str, str], state: Mapping[str, Any], recorder: Recorder
) -> dict[str, tuple[Any, list[str]]]:
    """First target -> (its own transform with the tensors it gathers, their names), as transformers' loader does."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    rules = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix = getattr(model, "base_model_prefix", "")
    gathered: dict[str, tuple[Any, list[str]]] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)  # type: ignore[arg-type]
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)  # type: ignore[arg-type]
        if target not in state:
            continue
        if target not in gathered:
            gathered[target] = (WeightRenaming(name, target) if pattern is None else deepcopy(by_pattern[pattern]), [])
        mapping, tensors = gathered[target]
        tensors.append(names[name])
        info = source.tensors[names[name]]
        _check_dtype(source, names[name], info.dtype, state[target].is_floating_point())
        turned = names[name] in source.transposed
        mapping.add_tensor(target, name, pattern or name, recorder.tensor(names[name], info, turned))
    return gathered


def _check_dtype(source: ModelSource, name: str, dtype: str, floating: bool) -> None:
    """Integers and float8 in the place of a float parameter are codes, whose scales no recipe knows."""
    if (floating and dtype not in _FLOATS) or dtype not in DTYPES:
        raise PlancError(
            f"{source.path}: tensor {name} has dtype {dtype}, {' or '.join(_FLOATS)} is expected; such "
            "tensors are read where config.json says in quantization_config what they mean. Use the unquantized model."
        )


def _converted(
    first: str, mapping: Any, tensors: list[str], model: nn.Module, source: ModelSource, recorder: Recorder
) -> dict[str, torch.Tensor]:
    operations = ", ".join(type(op).__name__ for op in getattr(mapping, "operations", []))
    try:
        with recorder:
            made = mapping.convert(first, model=model, config=model.config)
    except UnknownMoveError as e:
        raise refused(
            f"{source.path}: {first} is made of {len(tensors)} tensors, first {tensors[0]}, by transformers' "
            f"{operations}, which computes ({e}) and does not only move"
        ) from None
    except Exception as e:  # a rule fails in its own ways on tensors that it does not expect
        raise PlancError(
            f"{source.path}: transformers' {operations} does not apply to the {len(tensors)} tensors for {first}, "
            f"first {tensors[0]}: {type(e).__name__}: {one_line(e)} Check that the checkpoint is whole and belongs to "
            "its config.json."
        ) from e
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _recipe(recorder: Recorder, tensor: torch.Tensor, target: str, tensors: list[str], source: ModelSource) -> Recipe:
    recipe = recorder.recipe(tensor)
    if recipe is None:
        raise refused(f"{source.path}: {target} is made by a rule that does not move tensor {tensors[0]} alone")
    return recipe
