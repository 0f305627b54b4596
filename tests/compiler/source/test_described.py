"""Configs that come with planc are those models', by their published parameter counts; they hold no bytes."""

from math import prod
from pathlib import Path

import pytest

from planc.compiler.source import DescribedSource, bind, new_model, open_source
from planc.compiler.source.described import described
from planc.errors import UsageError
from tests.models import tiny

# Parameters in billions, as the models' own pages and papers give them.
BILLIONS = {
    "gemma-3-27b": 27.0,
    "gpt-oss-20b": 20.9,
    "llama-3-70b": 70.55,
    "llama-3-8b": 8.03,
    "llama-3.1-70b": 70.55,
    "llama-3.1-8b": 8.03,
    "llama-3.3-70b": 70.55,
    "mistral-7b": 7.25,
    "mixtral-8x7b": 46.7,
    "qwen2.5-72b": 72.7,
    "qwen2.5-7b": 7.62,
    "qwen3-30b-a3b": 30.5,
    "qwen3-32b": 32.76,
    "qwen3-8b": 8.19,
}


def test_every_config_is_counted() -> None:
    assert described() == sorted(BILLIONS)


@pytest.mark.parametrize("name", sorted(BILLIONS))
def test_a_config_makes_the_published_model(name: str) -> None:
    with open_source(name, weights=False) as source:
        count = sum(prod(t.shape) for t in source.tensors.values())
    assert count == pytest.approx(BILLIONS[name] * 1e9, rel=0.005)


def test_every_parameter_is_bound_to_its_own_name() -> None:
    with open_source("gpt-oss-20b", weights=False) as source:
        model = new_model(source.config())
        found = bind(model, source)
    assert found.unused == []
    assert all(recipe.loads == [name] or recipe.loads == (name,) for name, recipe in found.recipes.items())


def test_wanting_its_weights_says_what_to_do() -> None:
    with pytest.raises(UsageError, match="--weights none"):
        open_source("llama-3-8b")
    with open_source("llama-3-8b", weights=False) as source, pytest.raises(UsageError, match="--model with a folder"):
        source.read("model.norm.weight")


def test_a_folder_without_weights_is_described_when_none_are_wanted(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path)
    with open_source(str(folder)) as whole:
        tensors, fingerprint = dict(whole.tensors), whole.config().hidden_size
    (folder / "model.safetensors").unlink()
    with open_source(str(folder), weights=False) as source:
        assert isinstance(source, DescribedSource)
        assert source.has_tokenizer
        assert {n: t.shape for n, t in source.tensors.items()} == {n: t.shape for n, t in tensors.items()}
        assert source.config().hidden_size == fingerprint
