"""Kernels compile without a warning for ISA levels that this machine may lack, and with the other compiler."""

import re
import shutil
from pathlib import Path

import pytest

from planc.codegen.cpu import build_library
from planc.codegen.target import parse
from tests.kernels.harness import case, f32, i32, joined, tensor

KV = {"layer": 0, "heads": 2, "k_dim": 40, "v_dim": 40, "block": 16, "dtype": "bf16", "page_bytes": 8192}
KV |= {"k_offset": 0, "v_offset": 4096, "kind": "sliding", "window": 9, "scale": 0.5, "softcap": 3.0}
MASK = ("kind", "window", "scale", "softcap")
SCALES = {"k_scale_offset": 3072, "v_scale_offset": 7168}
APPENDED = (f32("T", 2, 40), f32("T", 2, 40), i32("T"), tensor("u8", "P", 8192))
TURNED = (f32("T", 6, 40), *APPENDED[:2], f32(50, 12), f32(50, 12), i32("T"), *APPENDED[2:])
PAGED = (f32("T", 6, 40), tensor("u8", "P", 8192), i32("S", "M"), i32("S1"), i32("T"))
QUANTIZED = {
    "int8": (tensor("i8", "T", 64), f32("T"), tensor("i8", 100, 64, layout="n64u4"), f32(100)),
    "fp8-block": (tensor("f8e4m3", "T", 64), f32("T"), tensor("f8e4m3", 100, 64, layout="n64k4"), f32(1, 100)),
    "awq-g32": (f32("T", 64), tensor("u4", 100, 64, layout="n64k8"), f32(2, 100), f32(2, 100)),
    "int4-wo-g32": (f32("T", 64), tensor("u4", 100, 64, layout="n64k8"), f32(2, 100)),
    "q4_1": (f32("T", 64), tensor("u4", 100, 64, layout="n64k8"), f32(2, 100), f32(2, 100)),
    "q6_k": (f32("T", 64), tensor("i8", 100, 64, layout="n64u4"), f32(4, 100)),
    "awq-g64": (f32("T", 64), tensor("u4", 100, 64, layout="n64k8"), *(tensor("bf16", 1, 100),) * 2),
    "int4-g64": (
        *(tensor("i8", "T", 64), f32("T", 1)),
        *(tensor("u4", 100, 64, layout="n64k8"), *(tensor("bf16", 1, 100),) * 2),
    ),
    "mxfp4": (f32("T", 64), tensor("u4", 100, 64, layout="n64k8"), f32(2, 100)),
}
CASES = [
    case("linear", f32("T", 70), tensor("bf16", 100, 70, layout="n64k2")),
    case("qlinear", f32("T", 70), tensor("i8", 100, 70, layout="n64u4"), f32(100), scheme="int8-wo"),
    case("layer_norm", f32("T", 70), f32(70), f32(70), eps=1e-5, bias=True),
    case("act_mul", f32("T", 20), f32("T", 20), act="gelu"),
    case("act_mul", f32("T", 20), f32("T", 20), act="gelu_tanh"),
    case("paged_attention", *PAGED, **KV),
    *(case("paged_attention", *PAGED, **KV | SCALES | {"dtype": dtype}) for dtype in ("i8", "f8e3m4")),
    *(
        case("kv_append", *APPENDED, **{k: v for k, v in KV.items() if k not in MASK} | SCALES | {"dtype": dtype})
        for dtype in ("i8", "f8e3m4")
    ),
    *(
        case("rotary_append", *TURNED, interleaved=inter, **{k: v for k, v in KV.items() if k not in MASK} | more)
        for inter, more in ((True, {}), (False, SCALES | {"dtype": "i8"}))
    ),
    *(
        case("add_rms_norm_quantize", f32("T", 70), f32("T", 70), f32(70), eps=1e-5, dtype=dtype)
        for dtype in ("i8", "f8e4m3")
    ),
    case("layer_norm_quantize", f32("T", 64), f32(64), f32(64), eps=1e-5, bias=True, dtype="i8", hadamard=64),
    case("act_mul_quantize", f32("T", 70), f32("T", 70), act="silu", dtype="i8"),
    *(case(op, f32("T", 20), f32("T", 20)) for op in ("pow", "ge", "ne", "remainder", "floor_divide")),
    *(case(op, i32("T", 20), i32("T", 1)) for op in ("ge", "remainder", "floor_divide")),
    *(case(op, f32("T", 20)) for op in ("round", "sign", "softmax", "cumsum", "amin", "argmax")),
    case("where", f32("T", 20), f32("T", 20), f32("T", 1)),
    case(
        "fused", f32("T", 2, 3, 4, 5), f32("T", 1, 3, 1, 5), code="mul(i0,-inf);where(t0,i1,nan);pow(t1,2.0);pow(t2,t1)"
    ),
    *(case("topk", f32("T", 200), k=k, largest=True) for k in (4, 200)),
    case("gather", i32("T", 20), i32("T", 3)),
    case("scatter", f32("T", 20), i32("T", 3), f32("T", 3), add=True),
    case("scatter", f32("T", 20), i32("T", 3), scalar=2.0),
    case("matmul", f32("T", 3, 20), f32("T", 20, 70)),
    case(
        "expert_linear", f32("T", 70), i32("T", 2), tensor("bf16", 4, 100, 70, layout="n64k2"), f32(4, 100), bias=True
    ),
    case(
        "qexpert_linear", f32("T", 70), i32("T", 2), tensor("i8", 4, 9, 70, layout="n64u4"), f32(4, 9), scheme="int8-wo"
    ),
    case("quantize_rows", f32("T", 70), dtype="i8"),
    case("quantize_rows", f32("T", 70), dtype="f8e4m3"),
    *(case("qlinear", *QUANTIZED[name], scheme=name) for name in QUANTIZED),
    case("qembedding", *QUANTIZED["mxfp4"][1:], i32("T"), scheme="mxfp4"),
    case("weighted_sum", f32("T", 3, 70), f32("T", 3)),
]


@pytest.mark.parametrize(
    ("target", "cxx"),
    [
        ("cpu:x86-64-v4+bf16+vnni", None),
        pytest.param("cpu:x86-64-v3", "clang++", marks=pytest.mark.slow),
        pytest.param("cpu:x86-64-v3+avxvnni", "clang++", marks=pytest.mark.slow),
        pytest.param("cpu:portable", "clang++", marks=pytest.mark.slow),
    ],
)
def test_compiles_without_a_warning(tmp_path: Path, target: str, cxx: str | None) -> None:
    if cxx and not shutil.which(cxx):
        pytest.skip(f"{cxx} is not installed")
    isa = parse(target)
    build_library({"all.cpp": joined([c.kernel(isa) for c in CASES])}, isa, tmp_path, cxx=cxx)


def dots(code: bytes, form: bytes) -> int:
    """How often vpdpbusd of ymm stands in machine code, in an encoding."""
    return sum(one & 15 == 2 and two & 0x87 == 5 for one, two in map(b"".join, re.findall(form, code, re.DOTALL)))


def test_avx_vnni_multiplies_bytes_in_its_own_encoding(tmp_path: Path) -> None:
    isa = parse("cpu:x86-64-v3+avxvnni")
    products = [c.kernel(isa) for c in CASES if c.op in ("qlinear", "qexpert_linear")]
    code = build_library({"all.cpp": joined(products)}, isa, tmp_path).read_bytes()
    assert dots(code, rb"\xc4(.)(.)\x50") > 500
    assert dots(code, rb"\x62(.)(.)\x28\x50") < 5, "EVEX, which no CPU without AVX-512 runs"
