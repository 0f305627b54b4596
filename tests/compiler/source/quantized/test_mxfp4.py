"""MXFP4 stacks of experts, against transformers' own loading of the same checkpoint, dequantized."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Mxfp4Config

from planc.compiler.reference import reference_logits
from planc.compiler.source import open_source
from planc.errors import PlancError
from tests.compiler.source.quantized.checkpoints import replace, restate
from tests.compiler.source.quantized.checks import check_parts, check_plain
from tests.models import tiny

CONFIG: dict[str, Any] = dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "lm_head"])
ENDINGS = ("experts.gate_up_proj", "experts.down_proj")


def written(path: Path) -> Path:
    """A checkpoint whose stacks of experts are drawn at random."""
    folder = tiny("gpt_oss", path, tokenizer=False, hidden_size=64, intermediate_size=96)
    rng = np.random.default_rng(0)

    def change(tensors: dict[str, Any]) -> dict[str, Any]:
        made = {name: t for name, t in tensors.items() if not name.endswith(ENDINGS)}
        for name in [name for name in tensors if name.endswith(ENDINGS)]:
            experts, k, n = tensors[name].shape
            made[f"{name}_blocks"] = rng.integers(0, 256, (experts, n, k // 32, 16), np.uint8)
            made[f"{name}_scales"] = rng.integers(120, 124, (experts, n, k // 32)).astype(np.uint8)
        return made

    replace(folder, change)
    restate(folder, CONFIG)
    return folder


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("mxfp4"))


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "model"))


def test_it_reads_as_transformers_dequantizes_it(pristine: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(
        pristine, dtype=torch.float32, attn_implementation="eager", quantization_config=Mxfp4Config(dequantize=True)
    )
    names = [name for name, _ in model.named_parameters() if name.endswith(ENDINGS)]
    ids = [3, 14, 15, 92, 65, 35]
    with open_source(str(pristine)) as source:
        assert dict(source.native) == dict.fromkeys(names, "mxfp4")
        assert source.transposed == set(names)
        for name in names:
            theirs = model.get_parameter(name).detach().numpy().swapaxes(-1, -2)
            assert source.tensors[name].dtype == "bf16"
            np.testing.assert_array_equal(source.read(name).astype(np.float32), theirs)
            np.testing.assert_array_equal(source.read_rows(name, 1, 2).astype(np.float32), theirs[1:2])
            pieces = np.concatenate(list(source.read_pieces(name, 1000))).astype(np.float32)
            np.testing.assert_array_equal(pieces, theirs.reshape(-1))
        check_parts(source)
        check_plain(source)
        logits = np.concatenate([rows for _, _, rows in reference_logits(source, [ids])])
    with torch.no_grad():
        np.testing.assert_allclose(logits, model(torch.tensor([ids])).logits[0].numpy(), atol=2e-5)


def test_codes_of_some_experts_are_read_alone(pristine: Path) -> None:
    with open_source(str(pristine)) as source:
        name = next(iter(source.native))
        for part in "qs":
            whole = source.read(f"{name}:{part}")
            np.testing.assert_array_equal(source.read_rows(f"{name}:{part}", 1, 3), whole[1:3])
        assert source.read(f"{name}:q").max() == 15


def test_missing_scales_are_named(folder: Path) -> None:
    gone = "model.layers.0.mlp.experts.down_proj_scales"
    replace(folder, lambda tensors: {name: t for name, t in tensors.items() if name != gone})
    with pytest.raises(PlancError, match=f"lacks the tensor {gone}"):
        open_source(str(folder))


def test_a_scale_that_is_not_a_number_is_named(folder: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj"

    def spoil(tensors: dict[str, Any]) -> dict[str, Any]:
        tensors[f"{name}_scales"][0, 0, 0] = 255
        return tensors

    replace(folder, spoil)
    with open_source(str(folder)) as source, pytest.raises(PlancError, match=f"{name} is damaged: its scales hold NaN"):
        source.read(name)


def test_an_unknown_field_is_refused(folder: Path) -> None:
    restate(folder, CONFIG | dict(novelty=3))
    with pytest.raises(PlancError, match="novelty = 3"):
        open_source(str(folder))
