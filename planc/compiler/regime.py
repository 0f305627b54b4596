"""Position modules whose values depend on the longest position: in goes a model, out come tables for one length.

A rotary embedding that scales with the sequence (`dynamic`, `longrope`) gives other angles for the same position once
the sequence is long. A packed step cannot follow that, so the regime is that of `limit`, the longest sequence that the
plan serves. Such a module is found by what it does: it takes `position_ids`, has no parameters, and its rows change
when a far position joins them.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

_NEAR, _FAR = 64, 1 << 24  # positions of a short prompt, and one beyond every length that a config may hold
_ROWS = 1 << 14  # positions that are evaluated at a time


@contextmanager
def fixed(model: nn.Module, limit: int) -> Iterator[list[str]]:
    """While it lasts, such modules of `model` answer as in a sequence of `limit` tokens; yields their paths.

    Under a trace their output is a table looked up by position, f32[limit, ...]; otherwise the rows themselves.
    """
    found: list[str] = []
    changed: list[nn.Module] = []
    for path, module in model.named_modules():
        if _takes_positions(module) and _depends_on_length(module):
            module.forward = _answer(module, limit)  # type: ignore[method-assign]
            changed.append(module)
            found.append(path)
    try:
        yield found
    finally:
        for module in changed:
            del module.forward  # the class's own shows again


def _takes_positions(module: nn.Module) -> bool:
    if next(module.parameters(), None) is not None or next(module.children(), None) is not None:
        return False
    return "position_ids" in inspect.signature(type(module).forward).parameters


def _depends_on_length(module: nn.Module) -> bool:
    """Whether any way of calling the module gives other rows beside a far position."""
    near = torch.arange(_NEAR)
    try:
        for keywords in _ways(module):
            alone, beside = (_rows(module, keywords, p)[0] for p in (near, torch.cat([near, torch.tensor([_FAR])])))
            if not torch.allclose(alone, beside[:_NEAR], rtol=1e-6, atol=1e-6, equal_nan=True):
                return True
    except Exception:  # noqa: BLE001 - a module that cannot run so is no rotary embedding; the trace decides
        return False
    return False


def _ways(module: nn.Module) -> list[dict[str, Any]]:
    """The keywords beside `position_ids` that its calls may differ by: the kind of layer, where there are several."""
    if "layer_type" not in inspect.signature(type(module).forward).parameters:
        return [{}]
    kinds = getattr(module, "layer_types", None) or getattr(module.config, "layer_types", None) or []
    return [{"layer_type": kind} for kind in dict.fromkeys(kinds)] or [{}]


def _rows(module: nn.Module, keywords: dict[str, Any], positions: Tensor) -> tuple[Tensor, ...]:
    """What a fresh copy on the CPU gives for positions [n], each output [n, ...]."""
    with torch.no_grad(), torch.device("cpu"):
        copy = type(module)(module.config)
        tensors = {n: torch.zeros(1, 1, 1) for n in _tensors(module) if n not in keywords}
        out = copy(position_ids=positions[None], **tensors, **keywords)
    return tuple(t[0] for t in (out if isinstance(out, tuple) else (out,)))


def _tensors(module: nn.Module) -> list[str]:
    """Names of the required arguments beside the positions: a tensor whose dtype and device the output takes."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return [p.name for p in parameters if p.default is p.empty and p.name not in ("position_ids", "layer_type")]


def _answer(module: nn.Module, limit: int) -> Callable[..., Any]:
    """The module's forward in the regime of `limit` tokens."""
    signature = inspect.signature(type(module).forward)
    tables: dict[str, tuple[Tensor, ...]] = {}

    def forward(*args: Any, **keywords: Any) -> Any:
        given = signature.bind(module, *args, **keywords).arguments
        positions = given.pop("position_ids")
        others = {k: v for k, v in given.items() if k != "self" and not isinstance(v, Tensor) and v is not None}
        key = repr(sorted(others.items()))
        if key not in tables:
            with _disable_current_modes():
                tables[key] = _table(module, others, limit)
        like = next((v for v in given.values() if isinstance(v, Tensor)), None)
        out = tuple(_look_up(t, positions, like) for t in tables[key])
        return out if len(out) > 1 else out[0]

    return forward


def _look_up(table: Tensor, positions: Tensor, like: Tensor | None) -> Tensor:
    if positions.device.type != "meta":
        rows = table[positions]
        return rows if like is None else rows.to(like.dtype)
    out: Tensor = torch.ops.planc.by_position(positions, table)
    return out


def _table(module: nn.Module, keywords: dict[str, Any], limit: int) -> tuple[Tensor, ...]:
    """Rows of every position below `limit`, each part evaluated beside the last position."""
    parts = []
    for start in range(0, limit, _ROWS):
        positions = torch.arange(start, min(start + _ROWS, limit))
        rows = _rows(module, keywords, torch.cat([positions, torch.tensor([limit - 1])]))
        parts.append([r[: len(positions)] for r in rows])
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))
