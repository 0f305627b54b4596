"""Fine-grained FP8: E4M3 codes in the weights' own place, and a scale per block, or per tensor, beside them."""

from __future__ import annotations

from typing import Any

import numpy as np

from planc.compiler.ir.quant import SCHEMES
from planc.compiler.source.quantized.layout import FLOATS, Found, Stored, check_fields
from planc.compiler.source.quantized.packed import Array, Packed
from planc.errors import PlancError

CODES = ("f8e4m3",)
_SCALES = (*FLOATS, "f8e8m0")
_ENDING, _OTHER = "_scale_inv", "_scale"

_FIELDS: dict[str, Any] = {
    "quant_method": None,
    "fmt": ("e4m3", "float8_e4m3fn"),
    "activation_scheme": ("dynamic", "static"),
    "weight_block_size": None,
    "scale_fmt": ("float", "ue8m0"),
    "expert_dtype": ("fp8",),
    # which modules are quantized is seen from their tensors
    **dict.fromkeys(("modules_to_not_convert", "modules_to_convert", "ignored_layers", "dequantize")),
}


def find(stored: Stored, stated: dict[str, Any]) -> Found:
    """Every tensor of E4M3, with its scales beside it under one of two names; both multiply."""
    check_fields(stored.path, "fp8", stated, _FIELDS)
    block = _block(stored, stated.get("weight_block_size"))
    found = Found()
    for name in [name for name, info in stored.source.tensors.items() if info.dtype in CODES]:
        scales = name + (_OTHER if stored.has(name + _OTHER) else _ENDING)
        found.weights[name] = scaled(stored, name, scales, block, "fp8")
        found.hidden.add(scales)
    hide_static(stored, found, (".activation_scale", ".input_scale"))
    return found


def scaled(stored: Stored, name: str, scales: str, block: tuple[int, int] | None, channels: str | None) -> Packed:
    """A tensor of codes in its own place, [N, K] or a stack of them, with a scale for each block of N and K, or for the
    tensor (block None). `channels` is the scheme of one scale a channel.
    """
    shape = stored.info(name, CODES).shape
    if len(shape) not in (2, 3):
        raise stored.misshapen(name, "2 axes, or 3 for a stack of experts")
    *stack, n, k = shape
    high, wide = (n, k) if block is None else block
    grid = (*stack, -(-n // high), -(-k // wide))
    held = stored.info(scales, _SCALES).shape
    if held != grid and not (block is None and held in ((), (1,), (*stack, 1), tuple(stack))):
        raise stored.misshapen(scales, str(list(grid)))

    def spread(start: int, stop: int) -> Array:
        return _spread(stored.wide(scales).reshape(grid), (*stack, n), high, start, stop)

    fits = channels if wide >= k else "fp8-block" if wide == SCHEMES["fp8-block"].group else None
    return Packed(
        shape=shape,
        codes=lambda start, stop: stored.rows(name, start, stop),
        scales=spread,
        group=wide,
        scheme=fits,
    )


def hide_static(stored: Stored, found: Found, endings: tuple[str, ...]) -> None:
    """Hides the static scales of activations, in whose place planc takes each token's own, and says so."""
    static = [name + ending for ending in endings for name in stored.named(ending)]
    if static:
        found.hidden |= set(static)
        found.notes.append(
            f"{len(static)} static scales of activations are not used, first {static[0]}: where activations are "
            "quantized, each token has its own scale"
        )


def _spread(grid: Array, rows: tuple[int, ...], high: int, start: int, stop: int) -> Array:
    """f32 [n, .., G]: a block's scale repeated for each of its rows."""
    if len(rows) > 1:
        grid = grid[start:stop]
    spread = np.repeat(grid, high, axis=-2)[..., : rows[-1], :]
    return spread if len(rows) > 1 else spread[start:stop]


def _block(stored: Stored, stated: Any) -> tuple[int, int] | None:
    if stated is None:
        return None
    if isinstance(stated, list) and len(stated) == 2 and all(type(size) is int and size > 0 for size in stated):
        return stated[0], stated[1]
    raise PlancError(
        f"{stored.path}: the quantization_config (fp8) has weight_block_size = {stated!r}; expected two "
        "numbers or null."
    )
