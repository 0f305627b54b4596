"""The buffers of a model on the meta device (rotary frequencies, embedding scales, masks) are made again on the CPU.

Checkpoints do not hold them: a model's constructor computes them, which on meta leaves no values.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from planc.compiler.ir.recipe import evaluate
from planc.compiler.refusal import refused
from planc.compiler.source.base import ModelSource
from planc.compiler.source.bind import Binding

if TYPE_CHECKING:
    import torch
    from torch import nn


def real_buffers(model: nn.Module, source: ModelSource, binding: Binding) -> dict[str, torch.Tensor]:
    """Every buffer of `model` by name, on the CPU, in its own dtype; the model itself is left as it is.

    Persistent buffers come from the checkpoint if it has them, the others from `fresh_buffers`.
    """
    every = dict(model.named_buffers(remove_duplicate=False))
    stored = {
        fqn: to_torch(evaluate(binding.recipes[fqn], source.read, {})).to(buffer.dtype)
        for fqn, buffer in every.items()
        if fqn in binding.recipes
    }
    return stored | fresh_buffers(model, every.keys() - stored.keys())


def fresh_buffers(model: nn.Module, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Values of the buffers `names` as the model's code makes them, on the CPU; the model itself is left as it is.

    The nearest enclosing PreTrainedModel's initialisation makes them, as `from_pretrained` has it do, or building the
    module again. PlancError names a buffer that neither yields.
    """
    made: dict[str, torch.Tensor] = {}
    for path, module, owner in _owned(model):
        fqns = {name: f"{path}.{name}" if path else name for name in module._buffers}
        wanted = {n: b for n, b in module._buffers.items() if b is not None and fqns[n] in names}
        fresh = _initialised(module, owner, wanted) if wanted else {}
        for name in wanted:
            if name not in fresh:
                raise refused(
                    f"buffer {fqns[name]} of {type(model).__name__}: neither checkpoint nor code gives it a value"
                )
            made[fqns[name]] = fresh[name]
    return made


def to_torch(array: Any) -> torch.Tensor:
    """A tensor that shares a numpy array's memory; ml_dtypes.bfloat16 becomes torch.bfloat16."""
    import ml_dtypes
    import numpy as np
    import torch

    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _owned(model: nn.Module) -> list[tuple[str, nn.Module, nn.Module]]:
    """(path, module, nearest enclosing PreTrainedModel) of each module that has buffers."""
    from transformers import PreTrainedModel

    owners: dict[str, nn.Module] = {}
    found = []
    for path, module in model.named_modules():
        parent = owners.get(path.rpartition(".")[0], model)
        owners[path] = module if isinstance(module, PreTrainedModel) else parent
        if any(buffer is not None for buffer in module._buffers.values()):
            found.append((path, module, owners[path]))
    return found


def _initialised(module: nn.Module, owner: nn.Module, wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the owner's _init_weights writes; a buffer that it leaves alone shows the filling, so two fillings tell."""
    zeros, ones = (_filled(module, owner, wanted, value) for value in (0, 1))
    fresh = {name: value for name, value in zeros.items() if value.equal(ones[name])}
    if len(fresh) < len(wanted):
        fresh = {**_rebuilt(module, owner, wanted), **fresh}
    return fresh


def _filled(module: nn.Module, owner: Any, wanted: dict[str, torch.Tensor], value: int) -> dict[str, torch.Tensor]:
    import torch

    before = dict(module._buffers)
    try:
        for name, buffer in wanted.items():
            module._buffers[name] = torch.full(buffer.shape, value, dtype=buffer.dtype, device="cpu")
        with torch.no_grad():
            owner._init_weights(module)
        return {name: made for name in wanted if (made := module._buffers[name]) is not None}
    finally:
        module._buffers.update(before)


def _rebuilt(module: nn.Module, owner: Any, wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Buffers of a second module of the same class on the CPU, for those that are built from a config alone (rotary
    embeddings).
    """
    import torch

    try:
        with torch.device("cpu"):
            other = type(module)(owner.config)
    except (TypeError, AttributeError, ValueError):
        return {}
    found = {name: other._buffers.get(name) for name in wanted}
    return {name: value for name, value in found.items() if value is not None and value.shape == wanted[name].shape}
