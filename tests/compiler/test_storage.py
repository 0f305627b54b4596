"""--dtype and --quant-config: what they say, what a quantized checkpoint says, and what is refused by name."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from planc.codegen.target import parse
from planc.compiler.ir.recipe import load
from planc.compiler.storage import check_kernels, storage, used
from planc.errors import PlancError, UsageError
from planc.passes.schemes import QuantConfig

Q, HEAD = "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"


def source(**native: str) -> Any:
    """A checkpoint that holds q_proj, and the head, so."""
    held = dict(zip([Q, HEAD], native.values(), strict=False))
    return SimpleNamespace(tensors={Q: None, HEAD: None}, native=held, requantizes=False)


def file(tmp_path: Path, said: object) -> Path:
    path = tmp_path / "quant.json"
    path.write_text(said if isinstance(said, str) else json.dumps(said))
    return path


def of(config: QuantConfig, name: str = Q, kind: str = "linear", k: int = 256) -> str:
    return config.of(load(name, "bf16", (64, k)), kind)


def test_auto_is_bf16_for_a_plain_checkpoint() -> None:
    config = storage("auto", None, source())
    assert [of(config, kind=kind) for kind in ("linear", "head", "embedding", "expert")] == ["bf16"] * 4


@pytest.mark.parametrize(
    ("dtype", "linear", "head", "embedding", "router"),
    [
        ("f32", "f32", "f32", "f32", "f32"),
        ("int8", "int8", "int8-wo", "bf16", "bf16"),
        ("fp8", "fp8", "bf16", "bf16", "bf16"),
        ("awq", "awq-g128", "int8-wo", "bf16", "bf16"),
        ("int4-wo-g32", "int4-wo-g32", "int8-wo", "bf16", "bf16"),
        ("int4-g64", "int4-g64", "int8", "bf16", "bf16"),
    ],
)
def test_what_decides_the_result_keeps_more_bits(
    dtype: str, linear: str, head: str, embedding: str, router: str
) -> None:
    config = storage(dtype, None, source())
    made = [of(config, kind=kind) for kind in ("linear", "expert", "head", "embedding", "router")]
    assert made == [linear, linear, head, embedding, router]


def test_a_file_says_it_of_single_modules(tmp_path: Path) -> None:
    said = {"default": "awq-g64", "lm_head": "bf16", "modules": {r"\.0\.self_attn\.q": "int8-wo", r"layers\.0": "bf16"}}
    config = storage("auto", file(tmp_path, said), source())
    assert of(config) == "int8-wo"  # the first that matches
    assert of(config, HEAD, "head") == "bf16"
    assert of(config, "model.layers.1.mlp.up_proj.weight") == "awq-g64"
    assert used(config) == ["awq-g64", "int8-wo"]


def test_a_group_that_fits_no_weight_is_refused_by_its_name() -> None:
    with pytest.raises(PlancError, match=r"q_proj.weight cannot be stored as awq.*48.*--quant-config"):
        of(storage("awq", None, source()), k=48)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("{", "is not JSON"),
        ([], "must be a JSON object"),
        ({"bits": 4}, "unknown field 'bits'"),
        ({"default": "nf4"}, "'nf4' is no storage"),
        ({"default": "mxfp4"}, "'mxfp4' is no storage"),
        ({"modules": ["q_proj"]}, "must map patterns"),
        ({"modules": {"q_proj(": "bf16"}}, "no regular expression"),
        ({"modules": {"qkv_proj": "bf16"}}, "no tensor of the checkpoint matches 'qkv_proj'"),
        ({"modules": {"q_proj": "int3"}}, "'int3' is no storage"),
    ],
)
def test_a_file_that_means_nothing_is_refused(said: object, told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=told.replace("(", r"\(")):
        storage("auto", file(tmp_path, said), source())


def test_a_file_that_is_missing_and_a_flag_that_differs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        storage("auto", tmp_path / "none.json", source())
    with pytest.raises(UsageError, match="differ"):
        storage("int8", file(tmp_path, {"default": "awq"}), source())
    with pytest.raises(UsageError, match="'int3' is no storage of weights; there are auto, bf16"):
        storage("int3", None, source())


def test_a_quantized_checkpoint_keeps_its_scheme() -> None:
    config = storage("auto", None, source(q="awq-g64"))
    assert config.default == "awq-g64"
    assert [of(config), of(config, HEAD, "head")] == ["awq-g64", "bf16"]
    left = [of(config, "model.layers.1.mlp.up_proj.weight", kind) for kind in ("linear", "expert", "router")]
    assert left == ["bf16"] * 3
    assert of(storage("bf16", None, source(q="awq-g64"))) == "bf16"
    assert of(storage("awq-g64", None, source(q="awq-g64"))) == "awq-g64"
    with pytest.raises(UsageError, match="quantized already, as awq-g64"):
        storage("int8", None, source(q="awq-g64"))


def test_a_file_that_says_so_may_be_rounded_again_and_keeps_what_its_targets_multiply(tmp_path: Path) -> None:
    held = source(q="q4_1", head="int4-wo-g32")
    held.requantizes = True
    assert of(storage("auto", None, held)) == "q4_1"
    assert of(storage("int8", None, held)) == "int8"
    assert storage("int4-wo-g32", None, held).native == {}  # some of it is that already, which is rounded again too
    whole = source(q="int4-wo-g32")
    whole.requantizes = True
    assert dict(storage("int4-wo-g32", None, whole).native) == {Q: "int4-wo-g32"}
    wide = storage("auto", file(tmp_path, {"lm_head": "bf16"}), held)
    assert [of(wide), of(wide, HEAD, "head")] == ["q4_1", "bf16"]
    gpu = storage("auto", None, held, [parse("cpu:portable"), parse("sm_90a")])
    assert set(gpu.native.values()) == {"int4-wo-g32"}
    assert of(gpu) == "bf16"
    check_kernels(gpu, parse("sm_90a"))


def test_schemes_without_kernels_are_listed_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    check_kernels(storage("awq", None, source()), parse("cpu:portable"))
    monkeypatch.setattr("planc.compiler.storage._has_kernels", lambda row, target: row.name == "int8")
    with pytest.raises(PlancError, match=r"no kernels for awq; it has them for int8, bf16 and f32"):
        check_kernels(storage("awq", None, source()), parse("cpu:portable"))
