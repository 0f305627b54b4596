"""Fine-grained FP8: blocks of any size and scales per tensor, against transformers' own dequantization."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from planc.compiler.reference import reference_logits
from planc.compiler.source import open_source
from planc.errors import PlancError
from tests.compiler.source.quantized.checkpoints import LINEAR, restate
from tests.compiler.source.quantized.checks import check_refused, check_source
from tests.models import tiny

CONFIG: dict[str, Any] = dict(
    quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128], scale_fmt="ue8m0"
)


def written(
    folder: Path, block: tuple[int, int] | None, endings: tuple[str, ...] = LINEAR, dtype: torch.dtype = torch.float32
) -> dict[str, np.ndarray[Any, Any]]:
    """Quantizes a folder's weights in blocks; returns what transformers makes of those whose blocks come out even, and
    of the others what the blocks mean.
    """
    tensors, expected = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(endings)]:
        weight = tensors[name].float()
        high, wide = block or weight.shape[-2:]
        *stack, n, k = weight.shape
        padded = torch.zeros(*stack, -(-n // high) * high, -(-k // wide) * wide)
        padded[..., :n, :k] = weight
        grid = padded.reshape(*stack, -(-n // high), high, -(-k // wide), wide)
        scales = (grid.abs().amax(dim=(-3, -1)) / 448).to(dtype)
        codes = (grid / scales.float()[..., :, None, :, None]).reshape(padded.shape)[..., :n, :k]
        tensors[name] = codes.to(torch.float8_e4m3fn).contiguous()
        tensors[f"{name}_scale_inv"] = scales if block else scales.reshape(())
        spread = scales.float().repeat_interleave(high, -2).repeat_interleave(wide, -1)[..., :n, :k]
        floats = tensors[name].float() * spread
        if not n % high and not k % wide:
            theirs = Fp8Dequantize(None)._dequantize_one(tensors[name], tensors[f"{name}_scale_inv"], torch.float32)
            assert torch.equal(theirs, floats)
        expected[name] = floats.numpy()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    restate(folder, CONFIG | dict(weight_block_size=list(block) if block else None))
    return expected


@pytest.mark.parametrize(
    ("block", "scheme"), [((128, 128), "fp8-block"), ((16, 128), "fp8-block"), ((32, 16), None), (None, "fp8")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_quantized_reads_back(
    block: tuple[int, int] | None, scheme: str | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = tiny("llama", tmp_path, tokenizer=False, hidden_size=192, intermediate_size=320)
    expected = written(folder, block, dtype=dtype)
    with open_source(str(folder)) as source:
        check_source(source, expected, scheme)


def test_transformers_loads_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own loading, which dequantizes where there is no GPU; it asks for accelerate, and does not use it."""
    monkeypatch.setattr("transformers.quantizers.quantizer_finegrained_fp8.is_accelerate_available", lambda: True)
    sizes = dict(hidden_size=128, intermediate_size=256, head_dim=32, num_key_value_heads=4)
    folder = tiny("llama", tmp_path, tokenizer=False, **sizes)
    expected = written(folder, (128, 128))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids = [3, 14, 15, 92, 65, 35]
    with open_source(str(folder)) as source, torch.no_grad():
        for name in expected:
            np.testing.assert_array_equal(source.read(name), model.get_parameter(name).numpy())
        logits = np.concatenate([rows for _, _, rows in reference_logits(source, [ids])])
        np.testing.assert_allclose(logits, model(torch.tensor([ids])).logits[0].numpy(), atol=2e-5)


def test_blocks_wider_than_the_weight_are_one_scale_a_channel(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path, tokenizer=False)
    expected = written(folder, (128, 128))
    with open_source(str(folder)) as source:
        check_source(source, expected, "fp8")


def test_a_tensor_for_each_expert(tmp_path: Path) -> None:
    """transformers stacks them, from plain names; the router is left as it is."""
    folder = tiny("qwen3_moe", tmp_path, tokenizer=False)
    expected = written(folder, (16, 16))
    assert any("experts.1." in name for name in expected)
    with open_source(str(folder)) as source:
        check_source(source, expected, None)


def test_stacks_of_experts(tmp_path: Path) -> None:
    """As transformers itself saves them: [E, N, K] with scales [E, n, k]."""
    folder = tiny("gpt_oss", tmp_path, tokenizer=False)
    expected = written(folder, (16, 16), ("experts.gate_up_proj", "experts.down_proj"))
    with open_source(str(folder)) as source:
        for name, floats in expected.items():
            np.testing.assert_array_equal(source.read(name), floats)
            np.testing.assert_array_equal(source.read_rows(name, 1, 3), floats[1:3])


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny("llama", tmp_path_factory.mktemp("fp8"), tokenizer=False)
    written(folder, (16, 16))
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "model"))


NAME = "model.layers.0.mlp.up_proj.weight"


def replace(folder: Path, tensors: dict[str, torch.Tensor], without: str = "") -> None:
    """numpy's half of safetensors has no float8."""
    found = {name: t for name, t in load_file(folder / "model.safetensors").items() if name != without} | tensors
    save_file(found, folder / "model.safetensors", {"format": "pt"})


def test_another_name_of_the_scales(folder: Path) -> None:
    """AutoFP8's, which vLLM reads."""
    tensors = load_file(folder / "model.safetensors")
    with open_source(str(folder)) as source:
        expected = {name: source.read(name) for name in source.plain_names}
    renamed = {name.replace("weight_scale_inv", "weight_scale"): t for name, t in tensors.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    with open_source(str(folder)) as source:
        assert set(source.plain_names) == set(expected)
        for name, floats in expected.items():
            np.testing.assert_array_equal(source.read(name), floats)


def test_static_scales_are_said_to_be_unused(folder: Path) -> None:
    scale = {"model.layers.0.mlp.up_proj.activation_scale": torch.ones(())}
    replace(folder, scale)
    restate(folder, CONFIG | dict(weight_block_size=[16, 16], activation_scheme="static"))
    with open_source(str(folder)) as source:
        assert any("1 static scales of activations are not used" in note for note in source.notes)
        assert not set(scale) & set(source.tensors)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": (dict(novelty=3), "novelty = 3"),
    "format": (dict(fmt="e5m2"), "fmt = 'e5m2'; planc reads 'e4m3'"),
    "4-bit experts": (dict(expert_dtype="fp4"), "expert_dtype = 'fp4'"),
    "blocks of another size": (dict(weight_block_size=[32, 32]), "_scale_inv has shape"),
    "blocks that are no numbers": (dict(weight_block_size=[128]), "weight_block_size = [128]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused_by_name(case: str, folder: Path) -> None:
    changes, words = REFUSED[case]
    check_refused(folder, CONFIG | changes, words)


def test_codes_without_scales_are_damaged(folder: Path) -> None:
    replace(folder, {}, without=f"{NAME}_scale_inv")
    with pytest.raises(PlancError, match=f"lacks the tensor {NAME}_scale_inv"):
        open_source(str(folder))


@pytest.mark.parametrize("part", ["codes", "scales"])
def test_what_is_not_a_number_is_named(part: str, folder: Path) -> None:
    spoilt = {
        "codes": {NAME: torch.full((96, 64), torch.nan).to(torch.float8_e4m3fn)},
        "scales": {f"{NAME}_scale_inv": torch.full((6, 4), torch.nan)},
    }[part]
    replace(folder, spoilt)
    restate(folder, CONFIG | dict(weight_block_size=[16, 16]))
    with (
        open_source(str(folder)) as source,
        pytest.raises(PlancError, match=rf"{NAME} is damaged: its {part} hold NaN"),
    ):
        source.read(NAME)
