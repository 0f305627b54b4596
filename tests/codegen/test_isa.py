"""Kernels compile without a warning for ISA levels that this machine may lack, and with the other compiler."""

import shutil
from pathlib import Path

import pytest

from planc.codegen.cpu import build_library
from planc.codegen.target import parse
from tests.kernels.harness import case, f32, i32, joined, tensor

KV = {"layer": 0, "heads": 2, "k_dim": 40, "v_dim": 40, "block": 16, "dtype": "bf16", "page_bytes": 8192}
KV |= {"k_offset": 0, "v_offset": 4096, "kind": "sliding", "window": 9, "scale": 0.5, "softcap": 3.0}
PAGED = (f32("T", 6, 40), tensor("u8", "P", 8192), i32("S", "M"), i32("S1"), i32("T"))
CASES = [
    case("linear", f32("T", 70), tensor("bf16", 100, 70, layout="n64k2")),
    case("qlinear", f32("T", 70), tensor("i8", 100, 70, layout="n64k4"), f32(100), scheme="int8"),
    case("layer_norm", f32("T", 70), f32(70), f32(70), eps=1e-5, bias=True),
    case("act_mul", f32("T", 20), f32("T", 20), act="gelu"),
    case("act_mul", f32("T", 20), f32("T", 20), act="gelu_tanh"),
    case("paged_attention", *PAGED, **KV),
]


@pytest.mark.parametrize(
    ("target", "cxx"), [("cpu:x86-64-v4+bf16+vnni", None), ("cpu:x86-64-v3", "clang++"), ("cpu:portable", "clang++")]
)
def test_compiles_without_a_warning(tmp_path: Path, target: str, cxx: str | None) -> None:
    if cxx and not shutil.which(cxx):
        pytest.skip(f"{cxx} is not installed")
    isa = parse(target)
    build_library({"all.cpp": joined([c.kernel(isa) for c in CASES])}, isa, tmp_path, cxx=cxx)
