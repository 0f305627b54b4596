"""MXFP4 stacks of experts: E2M1 codes [E, N, K/32, 16], two a byte, and a power of two for each 32 neighbours in K.

The parameter that they make is [E, K, N], which transformers' models multiply with from the right.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from planc.compiler.source.quantized import bits
from planc.compiler.source.quantized.layout import Found, Stored, check_fields
from planc.compiler.source.quantized.packed import Array, Packed

GROUP = 32
VALUES = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
_BIAS, _NAN = 127, 255  # of the exponents, as the OCP Microscaling format has them

# Which tensors are quantized is seen from their names.
_FIELDS: dict[str, Any] = dict.fromkeys(("quant_method", "modules_to_not_convert", "dequantize"))


def find(stored: Stored, stated: dict[str, Any]) -> Found:
    """Every `_blocks` with its `_scales`."""
    check_fields(stored.path, "mxfp4", stated, _FIELDS)
    found = Found()
    for name in stored.named("_blocks"):
        found.weights[name] = _packed(stored, name)
        found.hidden |= {f"{name}_blocks", f"{name}_scales"}
    return found


def _packed(stored: Stored, name: str) -> Packed:
    blocks, scales = f"{name}_blocks", f"{name}_scales"
    shape = stored.info(blocks, ("u8",), 4).shape
    experts, n, groups, half = shape
    if half != GROUP // 2:
        raise stored.misshapen(blocks, f"{GROUP // 2} bytes in its last axis")
    stored.shaped(scales, ("u8",), (experts, n, groups))
    k = groups * GROUP
    return Packed(
        shape=(experts, n, k),
        codes=lambda start, stop: bits.nibbles(stored.rows(blocks, start, stop).reshape(stop - start, n, k // 2)),
        scales=lambda start, stop: _powers(stored.rows(scales, start, stop)),
        group=GROUP,
        table=VALUES,
        scheme="mxfp4",
        dtype="bf16",  # which holds every product
        transposed=True,
    )


def _powers(exponents: Array) -> Array:
    odd = exponents == _NAN
    powers = np.ldexp(np.float32(1), np.where(odd, 0, exponents.astype(np.int32) - _BIAS))
    powers[odd] = np.nan
    return powers
