"""compressed-tensors: what the library wrote reads as the library and transformers dequantize it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from planc.compiler.reference import reference_logits
from planc.compiler.source import open_source
from planc.errors import PlancError
from tests.compiler.source.quantized.checkpoints import replace
from tests.compiler.source.quantized.checks import check_source
from tests.models import tiny

LIMIT = {("int", 4): 7.5, ("int", 8): 127.5, ("float", 8): 448.0}
TOKEN: dict[str, Any] = dict(num_bits=8, strategy="token", dynamic=True)


def weights(kind: str, bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return dict(type=kind, num_bits=bits, strategy=strategy, symmetric=True, dynamic=False) | more


def written(folder: Path, groups: dict[str, Any], ignore: tuple[str, ...] = ("lm_head",)) -> Path:
    """The library quantizes the folder's model and writes it in its place."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    config = dict(config_groups=groups, ignore=list(ignore), quant_method="compressed-tensors")
    apply_quantization_config(model, QuantizationConfig.model_validate(config))
    compressor = ModelCompressor.from_pretrained_model(model)
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            _calibrate(module, generator)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return folder


def _calibrate(module: Any, generator: torch.Generator) -> None:
    """Scales by the largest magnitude of what shares them; zero points at random."""
    args = module.quantization_scheme.weights
    n, k = module.weight.shape
    high, wide = {"tensor": (n, k), "channel": (1, k), "group": (1, args.group_size), "block": args.block_structure}[
        args.strategy
    ]
    padded = torch.zeros(-(-n // high) * high, -(-k // wide) * wide)
    padded[:n, :k] = module.weight.detach()
    peak = padded.reshape(len(padded) // high, high, -1, wide).abs().amax(dim=(1, 3))
    scale = (peak / LIMIT[args.type, args.num_bits]).reshape(module.weight_scale.shape)
    module.weight_scale.data = scale.to(module.weight_scale.dtype)
    if not args.symmetric:
        drawn = torch.randint(-7, 8, module.weight_zero_point.shape, generator=generator)
        module.weight_zero_point.data = drawn.to(torch.int8)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str | None]] = {
    "W4A16 group": (weights("int", 4, "group", group_size=32), None, "int4-wo-g32"),
    "W4A16 group asymmetric": (weights("int", 4, "group", group_size=32, symmetric=False), None, "awq-g32"),
    "W4A16 channel": (weights("int", 4, "channel"), None, "int4-wo-g{}"),
    "W4A16 channel asymmetric": (weights("int", 4, "channel", symmetric=False), None, "awq-g{}"),
    "W4A16 group of no scheme": (weights("int", 4, "group", group_size=16), None, None),
    "W8A16 channel": (weights("int", 8, "channel"), None, "int8-wo"),
    "W8A16 group": (weights("int", 8, "group", group_size=32), None, None),
    "W8A16 channel asymmetric": (weights("int", 8, "channel", symmetric=False), None, None),
    "W8A8": (weights("int", 8, "channel"), TOKEN | dict(type="int"), "int8"),
    "W8A8 tensor": (weights("int", 8, "tensor"), TOKEN | dict(type="int"), "int8"),
    "W8A8 asymmetric": (weights("int", 8, "channel", symmetric=False), TOKEN | dict(type="int"), None),
    "FP8 channel": (weights("float", 8, "channel"), TOKEN | dict(type="float"), "fp8"),
    "FP8 tensor": (weights("float", 8, "tensor"), TOKEN | dict(type="float"), "fp8"),
    "FP8 static": (weights("float", 8, "tensor"), dict(type="float", num_bits=8, strategy="tensor"), "fp8"),
    "FP8 weights alone": (weights("float", 8, "channel"), None, None),
    "FP8 block": (weights("float", 8, "block", block_structure=[16, 32]), TOKEN | dict(type="float"), None),
}


def dequantized(folder: Path) -> Any:
    """transformers' own loading, with every weight dequantized."""
    config = CompressedTensorsConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", quantization_config=config
    )


@pytest.mark.parametrize("case", CASES)
def test_the_librarys_own_checkpoints_read_as_it_dequantizes_them(case: str, tmp_path: Path) -> None:
    stated, inputs, scheme = CASES[case]
    folder = written(
        tiny("llama", tmp_path, tokenizer=False),
        dict(group_0=dict(targets=["Linear"], weights=stated, input_activations=inputs)),
    )
    model = dequantized(folder)
    names = [name for name, _ in model.named_parameters() if name.endswith("_proj.weight")]
    expected = {name: model.get_parameter(name).detach().numpy() for name in names}
    with open_source(str(folder)) as source:
        check_source(source, expected, scheme)
        if scheme is None:
            assert any(f"{len(names)} weights" in note for note in source.notes)
        ids = [3, 14, 15, 92, 65, 35]
        logits = np.concatenate([rows for _, _, rows in reference_logits(source, [ids])])
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(logits, theirs, atol=2e-5)


def test_blocks_of_128_are_those_of_the_scheme(tmp_path: Path) -> None:
    folder = written(
        tiny("llama", tmp_path, tokenizer=False, hidden_size=192, intermediate_size=320),
        dict(
            group_0=dict(
                targets=["Linear"],
                weights=weights("float", 8, "block", block_structure=[128, 128]),
                input_activations=dict(type="float", num_bits=8, strategy="group", group_size=128, dynamic=True),
            )
        ),
    )
    model = dequantized(folder)
    names = [name for name, _ in model.named_parameters() if name.endswith("_proj.weight")]
    with open_source(str(folder)) as source:
        check_source(source, {name: model.get_parameter(name).detach().numpy() for name in names}, "fp8-block")


def test_static_scales_of_activations_are_said_to_be_unused(tmp_path: Path) -> None:
    stated, inputs, _ = CASES["FP8 static"]
    groups = dict(group_0=dict(targets=["Linear"], weights=stated, input_activations=inputs))
    with open_source(str(written(tiny("llama", tmp_path, tokenizer=False), groups))) as source:
        (note,) = source.notes
        assert note.startswith("14 static scales of activations are not used, first model.layers.0")


def test_groups_go_by_their_targets(tmp_path: Path) -> None:
    """Attention by a pattern, one module by its name, the rest by its class; what is ignored stays as it is."""
    groups = dict(
        attention=dict(
            targets=["re:.*self_attn.*"],
            weights=weights("float", 8, "channel"),
            input_activations=TOKEN | dict(type="float"),
        ),
        one=dict(targets=["model.layers.1.mlp.up_proj"], weights=weights("int", 8, "channel")),
        rest=dict(targets=["re:.*mlp.(gate|down)_proj"], weights=weights("int", 4, "group", group_size=32)),
    )
    folder = written(tiny("llama", tmp_path, tokenizer=False), groups, ("lm_head", "model.layers.0.mlp.up_proj"))
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert stated["format"] == "mixed-precision"
    model = dequantized_by_module(folder, stated)
    with open_source(str(folder)) as source:
        assert source.native["model.layers.0.self_attn.q_proj.weight"] == "fp8"
        assert source.native["model.layers.1.mlp.up_proj.weight"] == "int8-wo"
        assert source.native["model.layers.1.mlp.gate_proj.weight"] == "int4-wo-g32"
        assert "model.layers.0.mlp.up_proj.weight" not in source.native
        for name in source.native:
            np.testing.assert_array_equal(source.read(name), model[name])


def dequantized_by_module(folder: Path, stated: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Each module through the library's compressor: transformers takes one scheme for all."""
    from compressed_tensors.compressors import BaseCompressor
    from safetensors.torch import load_file

    config = QuantizationConfig.model_validate(stated)
    kinds: Any = {(scheme.weights.type, scheme.weights.num_bits): scheme for scheme in config.config_groups.values()}
    tensors = load_file(folder / "model.safetensors")
    made = {}
    for name in tensors:
        if name.endswith(".weight_scale"):
            module = name.removesuffix(".weight_scale")
            wide = module == "model.layers.1.mlp.up_proj"
            scheme = kinds["float", 8] if "self_attn" in module else kinds["int", 8 if wide else 4]
            own = {key.removeprefix(f"{module}."): t for key, t in tensors.items() if key.startswith(f"{module}.")}
            compressor = BaseCompressor.get_value_from_registry(scheme.format)
            made[f"{module}.weight"] = compressor.decompress(own, scheme)["weight"].numpy()
    return made


PACKED = dict(group_0=dict(targets=["Linear"], weights=weights("int", 4, "group", group_size=32)))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tiny("llama", tmp_path_factory.mktemp("packed"), tokenizer=False), PACKED)


def restated(packed: Path, folder: Path, **changes: Any) -> Path:
    """A copy whose quantization_config has other fields."""
    folder.mkdir()
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((packed / "model.safetensors").read_bytes())
    return folder


FOUR = weights("int", 4, "channel")
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": (dict(novelty=3), "novelty = 3"),
    "format": (dict(format="nvfp4-pack-quantized"), "format = 'nvfp4-pack-quantized'"),
    "sparsity": (dict(sparsity_config=dict(format="sparse-24-bitmask")), "sparsity_config"),
    "status": (dict(quantization_status="frozen"), "quantization_status = 'frozen'"),
    "transforms": (dict(transform_config=dict(config_groups=dict(a=1))), "transform_config"),
    "no groups": (dict(config_groups={}), "no config_groups"),
    "no target": (
        dict(config_groups=dict(a=dict(targets=["Embedding"], weights=weights("int", 4, "group", group_size=32)))),
        "no group of the quantization_config targets it",
    ),
    "bits": (
        dict(config_groups=dict(a=dict(targets=["Linear"], weights=weights("int", 3, "channel")))),
        "num_bits = 3",
    ),
    "unknown field of weights": (
        dict(config_groups=dict(a=dict(targets=["Linear"], weights=weights("int", 4, "channel", rotated=True)))),
        "rotated = True",
    ),
    "output activations": (
        dict(config_groups=dict(a=dict(targets=["Linear"], weights=FOUR, output_activations=dict(num_bits=8)))),
        "output_activations",
    ),
    "4-bit floats": (
        dict(config_groups=dict(a=dict(targets=["Linear"], weights=weights("float", 4, "group", group_size=32)))),
        "4-bit floats",
    ),
    "groups that do not divide K": (
        dict(config_groups=dict(a=dict(targets=["Linear"], weights=weights("int", 4, "group", group_size=40)))),
        "groups of 40 do not divide",
    ),
    "groups of another size": (
        dict(config_groups=dict(a=dict(targets=["Linear"], weights=weights("int", 4, "group", group_size=16)))),
        "weight_scale has shape",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused_by_name(case: str, packed: Path, tmp_path: Path) -> None:
    changes, words = REFUSED[case]
    with pytest.raises(PlancError) as caught:
        open_source(str(restated(packed, tmp_path / "model", **changes)))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_cache_scheme_is_said_to_be_unread(packed: Path, tmp_path: Path) -> None:
    scheme = dict(type="float", num_bits=8, strategy="tensor", dynamic=False, symmetric=True)
    with open_source(str(restated(packed, tmp_path / "model", kv_cache_scheme=scheme))) as source:
        assert any("kv_cache_scheme is not read" in note for note in source.notes)


def test_codes_without_scales_are_damaged(packed: Path, tmp_path: Path) -> None:
    folder, gone = restated(packed, tmp_path / "model"), "model.layers.1.mlp.up_proj.weight_scale"
    replace(folder, lambda tensors: {name: t for name, t in tensors.items() if name != gone})
    with pytest.raises(PlancError, match=f"lacks the tensor {gone}"):
        open_source(str(folder))


def test_scales_that_are_not_numbers_are_named(packed: Path, tmp_path: Path) -> None:
    folder, name = restated(packed, tmp_path / "model"), "model.layers.1.mlp.up_proj.weight"

    def spoil(tensors: dict[str, Any]) -> dict[str, Any]:
        tensors[f"{name}_scale"][5, 1] = np.nan
        return tensors

    replace(folder, spoil)
    with open_source(str(folder)) as source:
        for read in (name, f"{name}:s"):
            with pytest.raises(PlancError, match=rf"{name} is damaged: its scales hold NaN"):
                source.read(read)
        with pytest.raises(PlancError, match=r"its scales hold NaN"):
            list(source.read_pieces(name))
