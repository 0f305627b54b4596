"""Binding: parameters find their tensors as from_pretrained does, and what does not fit is named."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from planc.compiler.ir.recipe import infer
from planc.compiler.source import bind, new_model, open_source
from planc.compiler.source.bind import Binding
from planc.errors import PlancError
from tests.models import ARCHS, tiny


def bound(folder: Path) -> Binding:
    source = open_source(str(folder))
    return bind(new_model(source.config()), source)


def edit(folder: Path, change) -> None:  # type: ignore[no-untyped-def]
    """Rewrites the checkpoint's tensors with change(name, array) -> {name: array}."""
    path = folder / "model.safetensors"
    tensors: dict[str, np.ndarray] = {}  # type: ignore[type-arg]
    for name, array in load_file(path).items():
        tensors.update(change(name, array))
    save_file(tensors, path)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_parameter_and_every_tensor_is_used(arch: str, tmp_path: Path) -> None:
    folder = tiny(arch, tmp_path, tokenizer=False)
    source = open_source(str(folder))
    model = new_model(source.config())
    binding = bind(model, source)
    assert binding.unused == []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert infer(binding.recipe(name)).shape == tuple(parameter.shape)
    assert set(binding.recipes) == {name for name, _ in model.named_parameters()}
    assert all(parameter.device.type == "meta" for parameter in model.parameters())


@pytest.mark.parametrize("arch", ["gemma2", "gpt2"])
def test_base_model_prefix_is_added(arch: str, tmp_path: Path) -> None:
    """A checkpoint of the base model alone (gpt2's own has no `transformer.`)."""
    folder = tiny(arch, tmp_path, tokenizer=False)
    edit(folder, lambda name, array: {name.split(".", 1)[1]: array})
    binding = bound(folder)
    assert binding.unused == []
    assert all(fqn.split(".", 1)[1] == r.get("name") for fqn, r in binding.recipes.items())


def test_tied_head_has_one_canonical_name(tmp_path: Path) -> None:
    binding = bound(tiny("gemma2", tmp_path, tokenizer=False))
    assert binding.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert binding.canonical("lm_head.weight") == "model.embed_tokens.weight"
    assert binding.recipe("lm_head.weight").loads[0] == "model.embed_tokens.weight"


def test_tied_head_stored_under_its_other_name(tmp_path: Path) -> None:
    folder = tiny("gemma2", tmp_path, tokenizer=False)
    edit(folder, lambda name, array: {name.replace("model.embed_tokens", "lm_head"): array})
    assert bound(folder).recipe("model.embed_tokens.weight").loads[0] == "lm_head.weight"


@pytest.mark.parametrize("same", [True, False])
def test_tied_head_stored_twice(tmp_path: Path, same: bool) -> None:
    folder = tiny("gemma2", tmp_path, tokenizer=False)
    twice = lambda name, array: {name: array, "lm_head.weight": array + (not same)}  # noqa: E731
    edit(folder, lambda name, array: twice(name, array) if "embed_tokens" in name else {name: array})
    if same:
        assert bound(folder).unused == []
        return
    binding = bound(folder)
    assert (binding.untied, binding.aliases) == (["lm_head.weight"], {})
    assert binding.recipe("lm_head.weight").loads == ("lm_head.weight",)


def test_missing_tensors(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path, tokenizer=False)
    edit(folder, lambda name, array: {} if "k_proj" in name else {name: array})
    with pytest.raises(
        PlancError, match=r"lacks 2 .*LlamaForCausalLM.*first model\.layers\.0\.self_attn\.k_proj\.weight"
    ):
        bound(folder)


def test_wrong_shape(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path, tokenizer=False)
    edit(folder, lambda name, array: {name: array[:-1] if "layers.1.mlp.up_proj" in name else array})
    with pytest.raises(
        PlancError, match=r"1 tensors .*layers\.1\.mlp\.up_proj\.weight: \[95, 64\], expected \[96, 64\]"
    ):
        bound(folder)


def test_unused_tensors_are_listed(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path, tokenizer=False)
    extra = {"model.vision.weight": np.zeros(2, np.float32), "a": np.zeros(1, np.float32)}
    edit(folder, lambda name, array: {name: array, **extra})
    assert bound(folder).unused == ["a", "model.vision.weight"]
