"""AutoAWQ's `gemm` layout: 4-bit codes [K, N/8] with eight neighbours in N a word, out of order, with zero points."""

from __future__ import annotations

from typing import Any

import numpy as np

from planc.compiler.source.quantized import bits
from planc.compiler.source.quantized.layout import FLOATS, Found, Stored, check_fields
from planc.compiler.source.quantized.packed import Array, Packed, grouped
from planc.errors import PlancError

# The column of each field of a word, lowest first.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_BITS, _A_WORD = 4, 8

_FIELDS: dict[str, Any] = {
    "quant_method": None,
    "bits": (_BITS,),
    "w_bit": (_BITS,),
    "group_size": None,
    "q_group_size": None,
    "version": ("gemm", "GEMM"),
    "format": ("gemm", "GEMM"),
    "checkpoint_format": ("gemm", "GEMM"),
    "pack_dtype": ("int32",),
    "desc_act": (False,),
    "dynamic": ({},),
    # which modules are quantized is seen from their tensors; the rest tells how they were made, or of other kernels
    **dict.fromkeys(
        (
            *("zero_point", "sym", "lm_head", "modules_to_not_convert", "backend", "do_fuse", "fuse_max_seq_len"),
            *("modules_to_fuse", "exllama_config", "meta", "dataset", "tokenizer", "damp_percent", "true_sequential"),
            *("act_group_aware", "model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block"),
            *("batch_size", "pad_token_id", "max_input_length", "cache_block_outputs", "modules_in_block_to_quantize"),
        )
    ),
}


def find(stored: Stored, stated: dict[str, Any]) -> Found:
    """Every module with a `qweight`."""
    check_fields(stored.path, "awq", stated, _FIELDS)
    group = stated.get("group_size", stated.get("q_group_size", 128))
    if type(group) is not int:
        raise PlancError(f"{stored.path}: the quantization_config (awq) has group_size = {group!r}, a number expected.")
    found = Found()
    for module in stored.named(".qweight"):
        found.weights[f"{module}.weight"] = _packed(stored, module, group)
        found.hidden |= {f"{module}.{part}" for part in ("qweight", "qzeros", "scales")}
    return found


def _packed(stored: Stored, module: str, group: int) -> Packed:
    words, zeros, scales = (f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
    k, n = stored.info(words, ("i32",), 2).shape
    groups = stored.divided(module, k, group)
    stored.shaped(zeros, ("i32",), (groups, n))
    stored.shaped(scales, FLOATS, (groups, n * _A_WORD))
    return Packed(
        shape=(n * _A_WORD, k),
        codes=lambda start, stop: _unpacked(stored.read(words), start, stop),
        scales=lambda start, stop: stored.wide(scales).T[start:stop],
        zeros=lambda start, stop: _unpacked(stored.read(zeros), start, stop).astype(np.float32),
        group=k // groups,
        scheme=grouped("awq", k // groups, k),
    )


def _unpacked(words: Array, start: int, stop: int) -> Array:
    """u8[stop - start, m]: rows `start` to `stop` of what i32[m, N/8] holds."""
    first, last = start // _A_WORD, -(-stop // _A_WORD)
    out = np.empty((last - first, _A_WORD, len(words)), np.uint8)
    for at in range(first, last, bits.TILE):
        found = bits.fields(words[:, at : min(at + bits.TILE, last)], _BITS)
        for field, column in enumerate(ORDER):
            out[at - first : at - first + found.shape[1], column] = found[..., field].T
    return out.reshape(-1, len(words))[start - first * _A_WORD : stop - first * _A_WORD]
