"""Quantized checkpoints: a folder with a quantization_config becomes a source of plain floats, and of parts as stored.

One row a method: a function that takes the checkpoint's tensors and the quantization_config, and finds in them the
weights and what they are made of. A method without a row is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from planc.compiler.source.base import ModelSource
from planc.compiler.source.folder import read_json
from planc.compiler.source.quantized import awq, compressed, fp8, gptq, mxfp4
from planc.compiler.source.quantized.layout import Found, Stored
from planc.compiler.source.quantized.source import QuantizedSource
from planc.errors import PlancError

Layout = Callable[[Stored, dict[str, Any]], Found]

METHODS: Mapping[str, Layout] = {
    "awq": awq.find,
    "gptq": gptq.find,
    "compressed-tensors": compressed.find,
    "fp8": fp8.find,
    "mxfp4": mxfp4.find,
}

_UNQUANTIZED = "Use the unquantized model: `--dtype` quantizes it."
# What to do instead of reading a method that is known and has no row.
REFUSED: Mapping[str, str] = {
    "bitsandbytes": "It holds no codes that a kernel could keep. Use the model that it was made from, with --dtype "
    "int8-wo or awq.",
    "auto-round": "Export the model in the format auto_awq or auto_gptq, which planc reads.",
    **dict.fromkeys(
        (
            *("aqlm", "bitnet", "eetq", "exl2", "exl3", "fbgemm_fp8", "fouroversix", "fp_quant", "gemma", "higgs"),
            *(
                "hqq",
                "metal",
                "modelopt",
                "mxfp8",
                "nvfp4",
                "qqq",
                "quanto",
                "quark",
                "sinq",
                "spqr",
                "torchao",
                "vptq",
            ),
        ),
        _UNQUANTIZED,
    ),
}


def dequantized(source: ModelSource) -> ModelSource:
    """The source itself if its config.json says nothing of quantization, else one that reads it as plain floats.

    Closes the source when it refuses it.
    """
    try:
        stated = _stated(source)
        if stated is None:
            _check_plain(source)
            return source
        method = _method(source, stated)
        found = METHODS[method](Stored(source), stated)
        if not found.weights:
            raise PlancError(
                f"{source.path}: config.json says that the model is quantized ({method}), and no tensor is. Check that "
                "config.json and the weights belong together."
            )
        return QuantizedSource(source, found)
    except BaseException:
        source.close()
        raise


def _check_plain(source: ModelSource) -> None:
    """Older tools wrote what is in the weights to a file of their own, which transformers does not read either."""
    if packed := next((name for name in source.tensors if name.endswith(".qweight")), None):
        raise PlancError(
            f"{source.path}: {packed} is a quantized weight, and config.json does not say how it was made. Put the "
            'fields of quantize_config.json below "quantization_config" there, with "quant_method": "gptq" or "awq".'
        )


def _stated(source: ModelSource) -> dict[str, Any] | None:
    """The quantization_config of a folder's config.json, or of the language model in it."""
    raw = read_json(source.path / "config.json")
    for table in (raw, raw.get("text_config") or {}):
        for field in ("quantization_config", "compression_config"):
            if table.get(field):
                return _object(source, field, table[field])
    return None


def _object(source: ModelSource, field: str, stated: Any) -> dict[str, Any]:
    if not isinstance(stated, dict):
        raise PlancError(f"{source.path}: {field} of config.json is no object. Fetch the file again or repair it.")
    return stated


def _method(source: ModelSource, stated: dict[str, Any]) -> str:
    method = stated.get("quant_method")
    if stated.get("load_in_4bit") or stated.get("load_in_8bit"):
        method = "bitsandbytes"
    if method in METHODS:
        return str(method)
    advice = REFUSED.get(str(method), f"planc reads {', '.join(METHODS)}. {_UNQUANTIZED}")
    raise PlancError(f"{source.path} is quantized ({method}), which planc does not read. {advice}")
