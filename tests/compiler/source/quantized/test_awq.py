"""AutoAWQ's layout: what was packed reads back, and the model is that of the floats."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.entrypoints.convert import AutoAWQConverter
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from planc.compiler.reference import reference_logits
from planc.compiler.source import open_source
from planc.errors import PlancError
from tests.compiler.source.quantized.checkpoints import Weight, awq, random_weight, replace, restate, write
from tests.compiler.source.quantized.checks import check_missing, check_refused, check_source
from tests.models import tiny

CONFIG: dict[str, Any] = dict(
    quant_method="awq", bits=4, group_size=32, version="gemm", zero_point=True, modules_to_not_convert=["lm_head"]
)


def drawn(group: int = 32, **more: Any) -> Any:
    return partial(random_weight, bits=4, group=group, rng=np.random.default_rng(0), **more)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Weight]]:
    folder = tiny("llama", tmp_path_factory.mktemp("awq"), tokenizer=False)
    return folder, write(folder, CONFIG, drawn(), awq)


@pytest.fixture
def folder(pristine: tuple[Path, dict[str, Weight]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine[0], tmp_path / "model"))


def test_what_was_packed_reads_back(pristine: tuple[Path, dict[str, Weight]]) -> None:
    folder, packed = pristine
    with open_source(str(folder)) as source:
        check_source(source, {name: weight.floats for name, weight in packed.items()}, "awq-g32")
        for name, weight in packed.items():
            np.testing.assert_array_equal(source.read(f"{name}:q"), weight.codes)
            np.testing.assert_array_equal(source.read(f"{name}:s"), weight.scales)
            np.testing.assert_array_equal(source.read(f"{name}:z"), weight.zeros)
        assert source.notes == ()


def test_half_precision_is_what_autoawq_multiplies_with(pristine: tuple[Path, dict[str, Weight]]) -> None:
    """Its kernels make f16 of a difference of integers times an f16 scale; that product is exact in f32."""
    folder, packed = pristine
    with open_source(str(folder)) as source:
        for name, weight in packed.items():
            zeros = np.repeat(weight.zeros, 32, axis=0)
            halves = (weight.codes.T - zeros).astype(np.float16) * np.repeat(weight.scales, 32, axis=0)
            np.testing.assert_array_equal(source.read(name).astype(np.float16), halves.T)


def test_logits_are_those_of_the_floats(pristine: tuple[Path, dict[str, Weight]], tmp_path: Path) -> None:
    folder, packed = pristine
    model: Any = AutoModelForCausalLM.from_pretrained(tiny("llama", tmp_path), attn_implementation="eager")
    for name, weight in packed.items():
        model.get_parameter(name).data = torch.from_numpy(weight.floats)
    ids = [3, 14, 15, 92, 65, 35]
    with open_source(str(folder)) as source, torch.no_grad():
        logits = np.concatenate([rows for _, _, rows in reference_logits(source, [ids])])
        np.testing.assert_allclose(logits, model(torch.tensor([ids])).logits[0].numpy(), atol=2e-5)


def test_another_librarys_conversion_means_the_same(folder: Path, tmp_path: Path) -> None:
    """compressed-tensors turns AutoAWQ's layout into its own: codes, scales and zero points stay what they were."""
    tensors = load_file(folder / "model.safetensors")
    converter = AutoAWQConverter.from_autoawq_config(CONFIG)
    converted = converter.process(dict(tensors))
    other = Path(shutil.copytree(folder, tmp_path / "converted"))
    save_file(converted, other / "model.safetensors", {"format": "pt"})
    config: Any = converter.update_config(None)
    restate(other, config.model_dump(mode="json"))
    with open_source(str(folder)) as source, open_source(str(other)) as theirs:
        assert dict(source.native) == dict(theirs.native)
        assert source.tensors == theirs.tensors
        for name in source.tensors:
            np.testing.assert_array_equal(source.read(name), theirs.read(name))


@pytest.mark.parametrize(("group", "scheme"), [(-1, "awq-g{}"), (64, "awq-g64"), (16, None)])
def test_group_sizes(group: int, scheme: str | None, tmp_path: Path) -> None:
    """A channel's one scale is repeated for the groups that a scheme has; smaller groups than any have no scheme."""
    folder = tiny("llama", tmp_path, tokenizer=False, **({} if group == -1 else dict(intermediate_size=128)))
    rng = np.random.default_rng(1)
    packed = write(
        folder,
        CONFIG | dict(group_size=group),
        lambda n, k: random_weight(n, k, 4, k if group == -1 else group, rng),
        awq,
    )
    with open_source(str(folder)) as source:
        check_source(source, {name: weight.floats for name, weight in packed.items()}, scheme)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": (dict(novelty=3), "novelty = 3"),
    "bits": (dict(bits=3), "bits = 3; planc reads 4"),
    "version": (dict(version="gemv"), "version = 'gemv'"),
    "group size that does not divide K": (dict(group_size=40), "groups of 40 do not divide"),
    "group size of other scales": (dict(group_size=16), "qzeros has shape"),
    "group size that is no number": (dict(group_size="32"), "group_size = '32'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused_by_name(case: str, folder: Path) -> None:
    changes, words = REFUSED[case]
    check_refused(folder, CONFIG | changes, words)


@pytest.mark.parametrize("part", ["qzeros", "scales"])
def test_missing_tensors_are_named(part: str, folder: Path) -> None:
    check_missing(folder, f"model.layers.0.mlp.up_proj.{part}")


def test_a_wrong_dtype_is_named(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.qweight"
    replace(folder, lambda tensors: tensors | {name: tensors[name].astype(np.int64)})
    with pytest.raises(PlancError, match=f"{name} has dtype i64, expected i32"):
        open_source(str(folder))


def test_scales_that_are_not_numbers_are_named(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj"
    scales = np.full((2, 96), np.inf, np.float16)
    replace(folder, lambda tensors: tensors | {f"{name}.scales": scales})
    with (
        open_source(str(folder)) as source,
        pytest.raises(PlancError, match=rf"{name}.weight is damaged: its scales hold NaN or infinity"),
    ):
        source.read(f"{name}.weight")


def test_the_fingerprint_is_not_that_of_the_floats(folder: Path, tmp_path: Path) -> None:
    with open_source(str(folder)) as source, open_source(str(tiny("llama", tmp_path, tokenizer=False))) as plain:
        assert source.fingerprint() != plain.fingerprint()
        stated = json.loads((folder / "config.json").read_text())
        assert "quantization_config" in stated
        assert "quantization_config" not in source.config().to_dict()
