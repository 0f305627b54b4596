"""The self-test: it passes real kinds of models, shrinks large ones, and each gate catches what it is there for."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, cache_utils
from transformers.models.llama import modeling_llama

from planc.compiler import gates
from planc.compiler.coverage.small import small
from planc.compiler.ir.graph import Node
from planc.compiler.shrink import shrunk
from planc.compiler.source import open_source
from planc.compiler.trace import trace
from planc.errors import PlancError
from tests.models import config_of, tiny


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def own_code(root: Path) -> Path:
    """A model folder whose config and model classes lie in the folder itself."""
    folder = tiny("llama", root, tokenizer=False)
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "gpt2"])
def test_default_config_of_an_architecture_passes(arch: str) -> None:
    assert gates.self_test(AutoConfig.for_model(arch)) <= 1e-5


@pytest.mark.parametrize("arch", ["bloom", "llama4_text", "mixtral", "deepseek_v3"])
def test_small_config_of_an_architecture_passes(arch: str) -> None:
    """Alibi behind no interface; tokens numbered by the model itself; experts; latent attention."""
    assert gates.self_test(small(arch)) <= 1e-5


def test_a_shrunk_config_keeps_each_kind_of_layer_and_the_grouping() -> None:
    config = config_of(
        "gemma3_text",
        hidden_size=1152,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        num_hidden_layers=12,
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 2,
        sliding_window=512,
    )
    copies = list(shrunk(config))
    assert [c.layer_types for c in copies[:2]] == [["sliding_attention", "full_attention"]] * 2
    assert [c.num_attention_heads // c.num_key_value_heads for c in copies[:2]] == [2, 2]
    made = copies[1]
    assert (made.num_attention_heads, made.num_key_value_heads, made.sliding_window) == (4, 2, 5)
    assert made.hidden_size < 200
    assert made.hidden_size != made.num_attention_heads * made.head_dim


def test_a_head_size_that_is_tied_to_something_else_is_kept() -> None:
    factors = [1.0 + i / 10 for i in range(24)]
    config = config_of(
        "phi3",
        hidden_size=192,
        rope_parameters=dict(
            rope_type="longrope", rope_theta=1e4, short_factor=factors, long_factor=factors, factor=2.0,
            original_max_position_embeddings=128,
        ),
        original_max_position_embeddings=128,
    )  # fmt: skip
    widths = [c.hidden_size // c.num_attention_heads for c in shrunk(config)]
    assert 48 in widths


@cache
def _right() -> gates.Small:
    with torch.no_grad():
        return gates._small(config_of("mistral", num_hidden_layers=1, rms_norm_eps=1e-6), False, None)


def _changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[Node], Node]) -> None:
    right = _right()
    wrong = replace(right, graph=right.graph.map_nodes(change))
    monkeypatch.setattr(gates, "_small", lambda config, trust, limit: wrong)


def _right_eps() -> float:
    return _right().model.config.rms_norm_eps


MISTAKES: dict[str, Callable[[Node], Node]] = {
    "window": lambda n: n.with_attrs(kind="causal", window=0) if n.op == "attention" else n,
    "scale": lambda n: n.with_attrs(scale=0.2) if n.op == "attention" else n,
    "eps": lambda n: n.with_attrs(scalar=1e-3) if n.op == "add" and n.attr("scalar", 0.0) == _right_eps() else n,
    "angle": lambda n: replace(n, op="sin") if n.op == "cos" else n,
    "not a number": lambda n: replace(n, op="log") if n.op == "silu" else n,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_logits_are_found(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    _changed(monkeypatch, lambda node: node)
    assert gates.self_test(config_of("mistral")) <= 1e-5
    _changed(monkeypatch, MISTAKES[mistake])
    with pytest.raises(PlancError, match=r"self-test: logits .* differ"):
        gates.self_test(config_of("mistral"))


def test_tokens_that_mix_outside_of_attention_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "lift", lambda traced, recipes: None)  # which would refuse it first
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: x + 0.1 * x.roll(1, 1))
    with pytest.raises(PlancError, match="tokens mix outside of attention"):
        gates.self_test(config_of("llama", num_hidden_layers=1))


def _numbering(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * (1 + torch.arange(x.shape[1], device=x.device)[None, :, None] / 64)


def test_a_model_that_restarts_counting_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, its tokens are numbered like their positions; continued from a cache, they start from 0 again."""
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", _numbering)
    assert trace(config_of("llama", num_hidden_layers=1)).numbers_tokens
    with pytest.raises(PlancError, match="continued from its cache it gives other logits than at once"):
        gates.self_test(config_of("llama", num_hidden_layers=1))


def test_a_model_that_forgets_what_its_cache_holds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama4's attention goes on counting from there, which lets it pass."""
    original = cache_utils.Cache.get_seq_length

    def forgets(self: Any, *asked_by_attention: int, layer_idx: int = 0) -> int:
        return 0 if asked_by_attention else original(self, layer_idx)

    monkeypatch.setattr(cache_utils.Cache, "get_seq_length", forgets)
    with pytest.raises(PlancError, match="continued from its cache it gives other logits than at once"):
        gates.self_test(small("llama4_text", floor_scale=4))


def test_a_model_that_counts_from_another_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = modeling_llama.LlamaModel.forward

    def from_two(self: Any, *args: Any, position_ids: Any = None, **keywords: Any) -> Any:
        tokens = keywords["input_ids"].shape[1]
        counted = torch.arange(tokens)[None] * 2 if position_ids is None else position_ids
        return original(self, *args, position_ids=counted, **keywords)

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", from_two)
    with pytest.raises(PlancError, match="other positions than 0, 1, 2"):
        gates.self_test(config_of("llama", num_hidden_layers=1))


def test_a_model_whose_own_attentions_differ_is_found() -> None:
    """falcon's eager attention adds its alibi twice, its default one once."""
    with pytest.raises(PlancError, match=r"eager attention of FalconForCausalLM and the one .* by default give logits"):
        gates.self_test(small("falcon", num_hidden_layers=1, alibi=True))
    assert gates.self_test(small("falcon", num_hidden_layers=1, alibi=False)) <= 1e-5


def test_nothing_differs_from_itself_by_not_a_number() -> None:
    nan = torch.tensor([float("nan")])
    assert not gates._distance(nan, nan) <= 1.0


def test_a_model_of_its_own_code_is_built_when_trusted(tmp_path: Path) -> None:
    folder = own_code(tmp_path)
    with open_source(str(folder), trust_remote_code=True) as source:
        with pytest.raises(PlancError, match="--trust-remote-code"):  # first: what is trusted once stays registered
            trace(source.config())
        with torch.no_grad():
            model = gates._small(source.config(), True, None).model
        assert type(model).__name__ == "OwnModel"
        assert model.config.intermediate_size != source.config().intermediate_size, "the shrunk copy keeps its code"
        assert gates.self_test(source.config(), trust_remote_code=True) <= 1e-5
        assert trace(source.config(), trust_remote_code=True).graph


def test_the_random_stream_and_the_registries_are_left_alone() -> None:
    from transformers.modeling_utils import AttentionInterface

    before, names = torch.random.get_rng_state(), set(AttentionInterface._global_mapping)
    gates.self_test(config_of("llama", num_hidden_layers=1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert set(AttentionInterface._global_mapping) == names
