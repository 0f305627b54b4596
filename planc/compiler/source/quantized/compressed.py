"""compressed-tensors: each module's layout is that of the group of its config that targets it.

Codes lie in the weight's own place (`weight`, of E4M3 or i8), or packed in words along K (`weight_packed`), both with
`weight_scale` per tensor, channel, group or block.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planc.compiler.source.quantized import bits
from planc.compiler.source.quantized.compressed_config import Config, Group, parsed
from planc.compiler.source.quantized.fp8 import hide_static, scaled
from planc.compiler.source.quantized.layout import FLOATS, Found, Stored
from planc.compiler.source.quantized.packed import Array, Packed, Rows, grouped

_STATIC = (".input_scale", ".input_zero_point", ".input_g_idx")


def find(stored: Stored, stated: dict[str, Any]) -> Found:
    """Every module with a `weight_scale`."""
    config = parsed(stored.path, stated)
    found = Found()
    for module in stored.named(".weight_scale"):
        group = config.group(module)
        found.weights[f"{module}.weight"] = _packed(stored, module, group)
        parts = ("weight_scale", "weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx")
        found.hidden |= {name for part in parts if stored.has(name := f"{module}.{part}")}
    _check_scales(stored, found)
    hide_static(stored, found, _STATIC)
    _say(found, config)
    return found


def _check_scales(stored: Stored, found: Found) -> None:
    """Codes without scales are damaged."""
    for name, info in stored.source.tensors.items():
        if name.endswith(".weight_packed") or (info.dtype in ("f8e4m3", "i8") and name.endswith(".weight")):
            stored.info(f"{name.rpartition('.')[0]}.weight_scale", FLOATS)


def _packed(stored: Stored, module: str, group: Group) -> Packed:
    if group.packed:
        return _in_words(stored, module, group)
    name = f"{module}.weight"
    if group.kind == "float":
        block = group.block or (None if group.strategy == "tensor" else (1, _width(stored, name, group)))
        return scaled(stored, name, f"{module}.weight_scale", block, "fp8" if group.activations else None)
    n, k = stored.info(name, ("i8",), 2).shape
    codes = "int8" if group.activations == "int" else "int8-wo"
    return _integers(stored, module, group, (n, k), lambda start, stop: stored.rows(name, start, stop), codes)


def _width(stored: Stored, name: str, group: Group) -> int:
    """Columns that share a scale of a strategy that does not share it among rows."""
    k = stored.info(name, ("f8e4m3",)).shape[-1]
    return k // stored.divided(name, k, group.size)


def _in_words(stored: Stored, module: str, group: Group) -> Packed:
    packed = f"{module}.weight_packed"
    rows, words = stored.info(packed, ("i32",), 2).shape
    shape = f"{module}.weight_shape"
    stored.shaped(shape, ("i64", "i32"), (2,))
    n, k = (int(size) for size in stored.read(shape))
    if (rows, words) != (n, -(-k * group.bits // 32)):
        raise stored.misshapen(packed, f"codes of {group.bits} bits for the {n} x {k} of its weight_shape")

    def codes(start: int, stop: int) -> Array:
        return bits.rows(stored.rows(packed, start, stop), group.bits)[:, :k]

    if group.bits == 8:
        return _integers(stored, module, group, (n, k), lambda start, stop: bits.signed(codes(start, stop)), "int8-wo")
    return _integers(stored, module, group, (n, k), codes, None)


def _integers(
    stored: Stored, module: str, group: Group, shape: tuple[int, int], codes: Rows, channels: str | None
) -> Packed:
    """Integer codes: i8, or u4 around 8 where `channels`, the scheme of i8 with a scale a channel, is None."""
    n, k = shape
    name, scales = f"{module}.weight", f"{module}.weight_scale"
    groups = 1 if group.strategy in ("tensor", "channel") else stored.divided(name, k, group.size)
    grids = [(1,), ()] if group.strategy == "tensor" else [(n, groups)]
    if stored.info(scales, FLOATS).shape not in grids:
        raise stored.misshapen(scales, str(list(grids[0])))
    order = _order(stored, module, k, groups)
    zeros = None if group.symmetric else _zeros(stored, module, group, n, groups)
    if channels is None:
        scheme = grouped("int4-wo" if zeros is None else "awq", k // groups, k)
    else:
        scheme = channels if zeros is None and groups == 1 else None
    return Packed(
        shape=shape,
        codes=codes,
        scales=lambda start, stop: np.broadcast_to(stored.wide(scales).reshape(-1, groups), (n, groups))[start:stop],
        zeros=zeros,
        offset=8 if channels is None and zeros is None else 0,
        group=k // groups,
        order=order,
        scheme=scheme if order is None else None,
    )


def _zeros(stored: Stored, module: str, group: Group, n: int, groups: int) -> Rows:
    """Zero points f32[N, G], in the codes' own numbers: packed ones lie along N, around the middle."""
    name = f"{module}.weight_zero_point"
    if not group.packed:
        held = stored.info(name, ("i8",)).shape
        if held not in ((n, groups), (1,), ()):
            raise stored.misshapen(name, str([n, groups]))
        return lambda start, stop: np.broadcast_to(stored.wide(name).reshape(-1, groups), (n, groups))[start:stop]
    stored.shaped(name, ("i32",), (-(-n * group.bits // 32), groups))

    def zeros(start: int, stop: int) -> Array:
        codes = bits.columns(stored.read(name), group.bits)[:, start:stop].T
        return codes.astype(np.float32) - np.float32(128 if group.bits == 8 else 0)

    return zeros


def _order(stored: Stored, module: str, k: int, groups: int) -> Array | None:
    """Each column's group where it is not k // group."""
    name = f"{module}.weight_g_idx"
    if not stored.has(name):
        return None
    stored.shaped(name, ("i32", "i64"), (k,))
    order = stored.read(name).astype(np.int64)
    if order.min() < 0 or order.max() >= groups:
        raise stored.misshapen(name, f"groups below {groups}")
    return None if np.array_equal(order, np.arange(k) // (k // groups)) else order


def _say(found: Found, config: Config) -> None:
    left = [name for name, packed in found.weights.items() if packed.scheme is None]
    if left:
        found.notes.append(
            f"{len(left)} weights are quantized in a way that no kernel takes, first {left[0]}: they are dequantized, "
            "and stored as a plain weight is"
        )
    if config.kv_cache:
        found.notes.append("kv_cache_scheme is not read: the cache is stored as --kv-cache-dtype says")
