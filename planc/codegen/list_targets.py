"""The table of targets: in goes nothing, out come each target's figures and what plans for it may store."""

from dataclasses import asdict
from typing import Any

from planc.codegen.skus import SKU, SM, skus
from planc.codegen.target import cpu_alone, known, kv_flags, needs_fp8
from planc.compiler.ir.quant import SCHEMES

_HEADS = ("target", "GPU", "SM", "SMs", "memory", "bandwidth", "bf16", "fp8", "int8", "fp4", "NVLink", "--dtype")
_WEIGHTS = ("bf16", "f32", *(n for n, row in SCHEMES.items() if not row.read_only and "-g" not in n))


def as_data() -> list[dict[str, Any]]:
    """Every GPU with all of its figures and their sources, and the values of --dtype and --kv-cache-dtype it takes."""
    return [_entry(sku) for sku in skus().values()]


def as_text() -> list[str]:
    """Aligned lines: a head, a line a GPU, then what else a target may be."""
    rows = [_HEADS, *(_row(sku) for sku in skus().values())]
    widths = [max(len(r[i]) for r in rows) for i in range(len(_HEADS))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    others = ", ".join(n for n in known() if n not in skus())
    return [
        *lines,
        "",
        "memory in GB, bandwidth and NVLink in GB/s, rates in dense TFLOP/s; --kv-cache-dtype bf16, f32, int8, and fp8 "
        "where --dtype has it",
        f"also: {others}",
    ]


def _dtypes(sm: SM) -> list[str]:
    return [n for n in _WEIGHTS if not cpu_alone(n) and (sm.fp8 or not needs_fp8(n))]


def _entry(sku: SKU) -> dict[str, Any]:
    figures = asdict(sku) | {"tflops": dict(sku.tflops), "sources": dict(sku.sources)}
    sm = asdict(sku.sm) | {"name": sku.sm.name}
    return figures | {"sm": sm, "dtypes": _dtypes(sku.sm), "kv_cache_dtypes": kv_flags(sku.sm)}


def _row(sku: SKU) -> tuple[str, ...]:
    rates = [_number(sku.tflops[d]) if d in sku.tflops else "-" for d in ("bf16", "fp8", "int8", "fp4")]
    return (
        sku.name,
        sku.gpu,
        sku.sm.name,
        str(sku.sms),
        _number(sku.memory_gb),
        _number(sku.bandwidth_gbs),
        *rates,
        _number(sku.nvlink_gbs) if sku.nvlink_gbs else "-",
        " ".join(_dtypes(sku.sm)),
    )


def _number(x: float) -> str:
    return f"{x:g}"
