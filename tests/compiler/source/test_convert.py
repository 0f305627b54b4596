"""Conversion: recipes make of a checkpoint what from_pretrained makes of it, whatever the checkpoint's layout."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, conversion_mapping
from transformers.core_model_loading import ConversionOps, Transpose, WeightConverter, WeightRenaming

from planc.compiler.ir.recipe import evaluate, infer
from planc.compiler.source import bind, new_model, open_source
from planc.compiler.source.bind import Binding
from planc.errors import PlancError
from tests.models import tiny
from tests.moe import MOE

EXPERTS = "model.layers.0.mlp.experts"
Change = Callable[[str, torch.Tensor], dict[str, torch.Tensor]]


def bound(folder: Path) -> Binding:
    with open_source(str(folder)) as source:
        return bind(new_model(source.config()), source)


def edit(folder: Path, change: Change) -> None:
    """Rewrites the checkpoint's tensors with change(name, tensor) -> {name: tensor}."""
    path = folder / "model.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        tensors.update(change(name, tensor))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def names(folder: Path) -> set[str]:
    return {name for file in folder.glob("*.safetensors") for name in load_file(file)}


def check(folder: Path) -> Binding:
    """Every parameter and persistent buffer is bitwise from_pretrained's; returns the binding."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    with open_source(str(folder)) as source:
        model = new_model(source.config())
        binding = bind(model, source)
        for name in model.state_dict():
            array = evaluate(binding.recipe(name), source.read, {}, source.read_rows)
            np.testing.assert_array_equal(array.astype(np.float32), theirs[name].numpy(), err_msg=name)
    return binding


def saved(arch: str, path: Path, **options: Any) -> Path:
    return tiny(arch, path, tokenizer=False, **{**MOE[arch], **options})


# ---- layouts of experts


@pytest.mark.parametrize("arch", MOE)
def test_saved_experts_are_those_of_from_pretrained(arch: str, tmp_path: Path) -> None:
    """save_pretrained writes each type's own layout: one tensor an expert, or fused ones."""
    folder = saved(arch, tmp_path)
    per_expert = any(".experts.1." in name for name in names(folder))
    assert per_expert == (arch not in ("gpt_oss", "granitemoe", "jetmoe", "dbrx"))
    binding = check(folder)
    assert binding.unused == []
    assert any(len(recipe.loads) > 4 for recipe in binding.recipes.values()) == per_expert


@pytest.mark.parametrize("arch", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_fused_experts_are_taken_as_they_are(arch: str, tmp_path: Path) -> None:
    folder = saved(arch, tmp_path)
    fused = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    save_file(fused, folder / "model.safetensors", metadata={"format": "pt"})
    binding = check(folder)
    assert binding.unused == []
    assert all(recipe.op == "load" for recipe in binding.recipes.values())


def test_experts_written_by_hand_are_stacked_by_number(tmp_path: Path) -> None:
    """Twelve experts: `experts.10` comes after `experts.9`, and gate before up, whatever the order in the file."""
    folder = saved("mixtral", tmp_path, num_local_experts=12)
    binding = check(folder)
    recipe = binding.recipe(f"{EXPERTS}.gate_up_proj")
    assert infer(recipe).shape == (12, 2 * 112, 96)
    wanted = [f"model.layers.0.block_sparse_moe.experts.{e}.{part}.weight" for part in ("w1", "w3") for e in range(12)]
    assert list(recipe.loads) == wanted


@pytest.mark.parametrize("arch", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_shards_may_part_a_layer(arch: str, tmp_path: Path) -> None:
    folder = saved(arch, tmp_path, max_shard_size="50KB")
    assert len(list(folder.glob("*.safetensors"))) > 4
    assert check(folder).unused == []


@pytest.mark.parametrize("arch", ["mixtral", "ernie4_5_moe"])
def test_the_stored_dtype_is_kept(arch: str, tmp_path: Path) -> None:
    with open_source(str(saved(arch, tmp_path, dtype="bfloat16"))) as source:
        recipes = bind(new_model(source.config()), source).recipes.values()
        assert {infer(recipe).dtype for recipe in recipes if len(recipe.loads) > 1} == {"bf16"}
        assert {infer(recipe).dtype for recipe in recipes} <= {"bf16", "f32"}


def test_experts_of_several_dtypes_take_the_wider(tmp_path: Path) -> None:
    folder = saved("mixtral", tmp_path)
    edit(folder, lambda name, t: {name: t.bfloat16() if ".experts.1." in name else t})
    assert infer(check(folder).recipe(f"{EXPERTS}.down_proj")).dtype == "f32"


# ---- splits and renames


@pytest.mark.parametrize("arch", ["sarvam_moe", "lara_mini"])
def test_a_fused_tensor_is_split(arch: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "sarvam_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=40, first_k_dense_replace=1),
        "lara_mini": dict(num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "sliding_attention"]),
    }[arch]
    binding = check(tiny(arch, tmp_path, tokenizer=False, **fields))
    assert binding.unused == []
    assert any(recipe.op == "slice" for recipe in binding.recipes.values())


def test_a_transpose_follows_the_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny("llama", tmp_path, tokenizer=False)
    rule(monkeypatch, "up_proj.weight", "up_proj.weight", Transpose(0, 1))
    edit(folder, lambda name, t: {name: t.T if "up_proj" in name else t})
    recipe = check(folder).recipe("model.layers.0.mlp.up_proj.weight")
    assert (recipe.op, recipe.get("perm"), infer(recipe).shape) == ("transpose", (1, 0), (96, 64))


def test_renames_come_before_converters(tmp_path: Path) -> None:
    """mixtral's `block_sparse_moe` is renamed first; the fused names need none."""
    folder = saved("mixtral", tmp_path)
    edit(folder, lambda name, t: {name.replace("block_sparse_moe", "mlp"): t})
    assert check(folder).unused == []


def rule(monkeypatch: pytest.MonkeyPatch, source: str, target: str, *operations: ConversionOps) -> None:
    """The only conversion rule of any model."""
    made = WeightConverter(source, target, list(operations)) if operations else WeightRenaming(source, target)
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda *args, **kwargs: [made])
    monkeypatch.setattr("transformers.modeling_utils.get_model_conversion_mapping", lambda *args, **kwargs: [made])


class Halve(ConversionOps):
    """A rule that computes."""

    def convert(self, input_dict: Any, **others: Any) -> Any:
        return {key: value[0] * 0.5 for key, value in input_dict.items()}


class Peek(ConversionOps):
    """A rule that looks at values."""

    def convert(self, input_dict: Any, **others: Any) -> Any:
        return {key: value[0] if value[0].sum() > 0 else -value[0] for key, value in input_dict.items()}


@pytest.mark.parametrize(
    ("operation", "word"),
    [(Halve(), r"Halve, which computes \(mul.Tensor\)"), (Peek(), r"Peek, which computes \(sum.default\)")],
)
def test_a_rule_that_computes_is_refused(
    operation: ConversionOps, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny("llama", tmp_path, tokenizer=False)
    rule(monkeypatch, "up_proj.weight", "up_proj.weight", operation)
    with pytest.raises(PlancError, match=rf"layers.0.mlp.up_proj.weight is made of 1 tensors, .*{word}"):
        bound(folder)


# ---- what does not fit


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder = saved("mixtral", tmp_path)
    edit(folder, lambda name, t: {} if "layers.0" in name and ".experts.2.w2" in name else {name: t})
    message = (
        r"1 tensors have a shape .*layers.0.mlp.experts.down_proj \(3 tensors, .*experts.0.w2.weight\): \[3, 96, 112\]"
    )
    with pytest.raises(PlancError, match=message):
        bound(folder)


def test_a_missing_half_is_named(tmp_path: Path) -> None:
    folder = saved("qwen3_moe", tmp_path)
    edit(folder, lambda name, t: {} if "layers.1" in name and ".experts." in name and "up_proj" in name else {name: t})
    with pytest.raises(PlancError, match=r"does not apply to the 4 tensors for model.layers.1.*gate_up_proj"):
        bound(folder)


def test_unlike_experts_are_named(tmp_path: Path) -> None:
    folder = saved("mixtral", tmp_path)
    edit(folder, lambda name, t: {name: t[:-1] if "layers.0" in name and ".experts.1.w1" in name else t})
    with pytest.raises(PlancError, match=r"MergeModulelist, Concatenate does not apply to the 8 tensors for .*gate_up"):
        bound(folder)


def test_extra_experts_of_another_layer_are_unused(tmp_path: Path) -> None:
    """As deepseek_v3's layer for predicting further tokens, which transformers does not build."""
    folder = saved("deepseek_v3", tmp_path, num_hidden_layers=2)
    copied: Change = lambda name, t: {name: t, name.replace("layers.1", "layers.2"): t.clone()}  # noqa: E731
    edit(folder, lambda name, t: copied(name, t) if ".layers.1." in name else {name: t})
    unused = check(folder).unused
    assert len(unused) > 20
    assert all(name.startswith("model.layers.2.") for name in unused)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.float64])
def test_codes_in_the_place_of_weights_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path, tokenizer=False)
    edit(folder, lambda name, t: {name: t.to(dtype) if "layers.1.mlp.up_proj" in name else t})
    with pytest.raises(PlancError, match=r"model.layers.1.mlp.up_proj.weight has dtype .*f32 or f16 or bf16"):
        bound(folder)


def test_unused_tensors_may_have_any_dtype(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path, tokenizer=False)
    edit(folder, lambda name, t: {name: t, "scales": torch.zeros(2, dtype=torch.float8_e4m3fn)})
    assert bound(folder).unused == ["scales"]


def test_a_config_without_the_field_unties(tmp_path: Path) -> None:
    """from_pretrained keeps a head of its own apart from the embedding, although the config ties them."""
    folder = tiny("gemma2", tmp_path, tokenizer=False)
    edit(folder, lambda name, t: {name: t, "lm_head.weight": t + 1} if "embed_tokens" in name else {name: t})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "tie_word_embeddings"}))
    assert check(folder).untied == ["lm_head.weight"]
