"""GPTQ's layout: codes [K/8, N] of 4 bits or [K/4, N] of 8 with neighbours in K a word, zero points, columns in groups.

`g_idx` gives each column's group. Where it is not k // group (act-order), no scheme holds the columns as they lie.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planc.compiler.source.quantized import bits
from planc.compiler.source.quantized.layout import FLOATS, Found, Stored, check_fields
from planc.compiler.source.quantized.packed import Array, Packed, grouped
from planc.errors import PlancError

# What `gptq` subtracts from each packed field of zero points, a borrow going to the next; `gptq_v2` subtracts nothing.
_LESS = {4: np.uint32(0x11111111), 8: np.uint32(0x01010101)}
_FORMATS = ("gptq", "gptq_v2")

_FIELDS: dict[str, Any] = {
    "quant_method": None,
    "bits": tuple(_LESS),
    "group_size": None,
    "format": _FORMATS,
    "checkpoint_format": _FORMATS,
    "pack_dtype": ("int32",),
    "dynamic": None,  # checked on its own
    "is_marlin_format": (False,),
    "rotation": (),
    "adapter": (),
    # which modules are quantized is seen from their tensors; the rest tells how they were made, or of other kernels
    **dict.fromkeys(
        (
            *("sym", "desc_act", "lm_head", "static_groups", "true_sequential", "damp_percent", "damp_auto_increment"),
            *("model_name_or_path", "model_file_base_name", "meta", "dataset", "tokenizer", "quantizer", "backend"),
            *("act_group_aware", "hyb_act", "mse", "gptaq", "v2", "v2_alpha", "batch_size", "pad_token_id"),
            *("use_exllama", "disable_exllama", "exllama_config", "use_cuda_fp16", "max_input_length", "model_seqlen"),
            *("cache_block_outputs", "modules_in_block_to_quantize", "block_name_to_quantize"),
            *("module_name_preceding_first_block", "modules_to_not_convert"),
        )
    ),
}


def find(stored: Stored, stated: dict[str, Any]) -> Found:
    """Every module with a `qweight`."""
    check_fields(stored.path, "gptq", stated, _FIELDS)
    _check_dynamic(stored, stated.get("dynamic") or {})
    width, group = stated.get("bits"), stated.get("group_size", 128)
    if width is None or type(group) is not int:
        raise PlancError(f"{stored.path}: the quantization_config (gptq) needs bits and a group_size that are numbers.")
    version = stated.get("checkpoint_format") or stated.get("format") or "gptq"
    less = _LESS[width] if version == "gptq" else np.uint32(0)
    found = Found()
    for module in stored.named(".qweight"):
        found.weights[f"{module}.weight"] = _packed(stored, module, width, group, less)
        found.hidden |= {f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")}
    _say(found, width)
    return found


def _check_dynamic(stored: Stored, dynamic: dict[str, Any]) -> None:
    """Rules `-:PATTERN` leave modules unquantized, which their tensors show. Others change bits or groups."""
    if changes := [pattern for pattern in dynamic if not str(pattern).startswith("-:")]:
        raise PlancError(
            f"{stored.path}: the quantization_config (gptq) has a dynamic rule for {changes[0]!r}, which planc does "
            "not read: all modules must share bits and group_size. Use the unquantized model."
        )


def _packed(stored: Stored, module: str, width: int, group: int, less: np.uint32) -> Packed:
    words, zeros, scales = (f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
    a_word = 32 // width
    rows, n = stored.info(words, ("i32",), 2).shape
    k = rows * a_word
    groups = stored.divided(module, k, group)
    if n % a_word:
        raise stored.misshapen(words, f"a multiple of {a_word} output channels")
    stored.shaped(zeros, ("i32",), (groups, n // a_word))
    stored.shaped(scales, FLOATS, (groups, n))
    order = _order(stored, f"{module}.g_idx", k, groups)
    every = _zeros(stored.read(zeros), width, less)
    middle = 1 << (width - 1)
    even = bool((every == middle).all())
    narrow = width == 8 and even and groups == 1  # codes around 128 fit in i8, channel by channel
    return Packed(
        shape=(n, k),
        codes=lambda start, stop: _codes(stored.read(words)[:, start:stop], width, narrow),
        scales=lambda start, stop: stored.wide(scales).T[start:stop],
        zeros=None if even else lambda start, stop: _zeros(stored.read(zeros), width, less)[start:stop],
        offset=middle if even and not narrow else 0,
        group=k // groups,
        order=order,
        scheme=_scheme(width, even, narrow, k // groups, k) if order is None else None,
    )


def _scheme(width: int, even: bool, narrow: bool, group: int, k: int) -> str | None:
    if width == 4:
        return grouped("int4-wo" if even else "awq", group, k)
    return "int8-wo" if narrow else None


def _order(stored: Stored, name: str, k: int, groups: int) -> Array | None:
    """Each column's group, if it is not k // group."""
    if not stored.has(name):
        return None
    stored.shaped(name, ("i32", "i64"), (k,))
    order = stored.read(name).astype(np.int64)
    if order.min() < 0 or order.max() >= groups:
        raise PlancError(
            f"{stored.path}: tensor {name} speaks of group {int(np.abs(order).max())}, there are {groups}. "
            "Fetch the checkpoint again."
        )
    return None if np.array_equal(order, np.arange(k) // (k // groups)) else order


def _codes(words: Array, width: int, narrow: bool) -> Array:
    codes = bits.columns(words, width)
    return bits.signed(codes) if narrow else codes


def _zeros(words: Array, width: int, less: np.uint32) -> Array:
    """f32[N, G] zero points of i32[G, N * width / 32]."""
    plain = (words.view(np.uint32) + less).view(np.int32)
    return np.ascontiguousarray(bits.rows(plain, width).T).astype(np.float32)


def _say(found: Found, width: int) -> None:
    ordered = [name for name, packed in found.weights.items() if packed.order is not None]
    others = [name for name, packed in found.weights.items() if packed.scheme is None and packed.order is None]
    if ordered:
        found.notes.append(
            f"{len(ordered)} weights are quantized in act-order, first {ordered[0]}: no kernel takes their codes, so "
            "they are dequantized, and stored as a plain weight is"
        )
    if others:
        found.notes.append(
            f"{len(others)} weights have {width}-bit codes in groups that no kernel takes, first {others[0]}: they are "
            "dequantized, and stored as a plain weight is"
        )
