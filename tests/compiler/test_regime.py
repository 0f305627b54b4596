"""Rotary angles that depend on a sequence's length: fixed as transformers has them in the longest sequence served."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from planc.compiler import regime
from planc.compiler.coverage.small import small
from planc.compiler.lift import lift
from planc.compiler.trace import trace
from tests.compiler.lift.capture import recipes, run
from tests.models import random_model

ORIGINAL = 64  # tokens that the configs were "trained" with
SHORT, LONG = 48, 100
_SHORT_FACTOR, _LONG_FACTOR = [1.0 + i / 10 for i in range(12)], [2.0 + i / 2 for i in range(12)]
LONGROPE = dict(
    rope_type="longrope", rope_theta=1e4, short_factor=_SHORT_FACTOR, long_factor=_LONG_FACTOR, factor=4.0,
    original_max_position_embeddings=ORIGINAL,
)  # fmt: skip
DYNAMIC = dict(rope_type="dynamic", rope_theta=1e4, factor=3.0)
DEFAULT = dict(rope_type="default", rope_theta=1e4)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("llama", dict(num_hidden_layers=1, rope_parameters=DYNAMIC, max_position_embeddings=ORIGINAL)),
    "longrope": (
        "phi3",
        dict(
            num_hidden_layers=1,
            rope_parameters=LONGROPE,
            max_position_embeddings=256,
            original_max_position_embeddings=ORIGINAL,
        ),
    ),
    "longrope with its own scale": (
        "phimoe",
        dict(
            num_hidden_layers=1,
            rope_parameters=LONGROPE | dict(short_mscale=1.2, long_mscale=1.4),
            original_max_position_embeddings=ORIGINAL,
        ),
    ),
    "one of two kinds of layers": (
        "gemma3_text",
        dict(
            rope_parameters=dict(full_attention=DYNAMIC, sliding_attention=DEFAULT),
            max_position_embeddings=ORIGINAL,
            num_hidden_layers=2,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
}


def _models(name: str) -> tuple[Any, nn.Module]:
    arch, fields = MODELS[name]
    config = small(arch, **fields)
    return config, random_model(config)


def _theirs(model: nn.Module, ids: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0].numpy()


def _error(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_answers_as_transformers_does_in_its_longest_sequence(name: str) -> None:
    config, model = _models(name)
    ids = torch.randint(4, 300, (1, LONG), generator=torch.Generator().manual_seed(0))
    theirs = {SHORT: _theirs(model, ids[:, :SHORT]), LONG: _theirs(model, ids)}
    for limit in (SHORT, LONG):
        traced = trace(config, limit=limit)
        assert (traced.regimes, traced.limit) == (("model.rotary_emb",), limit)
        graph = lift(traced, recipes(model))
        rows = torch.tensor([limit - 1, 0, 20])
        ours = run(graph, model.state_dict(), ids[:, :limit], torch.arange(limit)[None], rows)
        assert _error(ours, theirs[limit][rows]) <= 1e-5
        if limit == LONG:  # a prefix of a long sequence is not what a short one is
            early = run(graph, model.state_dict(), ids[:, :SHORT], torch.arange(SHORT)[None], torch.tensor([SHORT - 1]))
            assert _error(early, theirs[LONG][SHORT - 1 : SHORT]) <= 1e-5
            assert _error(early, theirs[SHORT][-1:]) > 1e-3


@pytest.mark.parametrize("name", ["dynamic", "longrope with its own scale"])
def test_a_module_fixed_outside_of_a_trace_gives_rows_of_that_regime(name: str) -> None:
    """So the judge and the self-test run transformers' modules in the regime of the plan."""
    _, model = _models(name)
    ids = torch.randint(4, 300, (1, LONG), generator=torch.Generator().manual_seed(0))
    long, short = _theirs(model, ids), _theirs(model, ids[:, :SHORT])
    with regime.fixed(model, LONG) as found:
        assert found == ["model.rotary_emb"]
        assert _error(_theirs(model, ids[:, :SHORT]), long[:SHORT]) <= 1e-5
        assert _error(_theirs(model, ids), long) <= 1e-5
    assert "forward" not in vars(model.get_submodule("model.rotary_emb"))
    assert _error(_theirs(model, ids[:, :SHORT]), short) <= 1e-5


def test_it_is_left_alone_when_the_model_fails() -> None:
    _, model = _models("dynamic")
    with pytest.raises(ZeroDivisionError), regime.fixed(model, LONG):
        raise ZeroDivisionError
    assert "forward" not in vars(model.get_submodule("model.rotary_emb"))


@pytest.mark.parametrize(
    "parameters",
    [
        DEFAULT,
        dict(rope_type="linear", rope_theta=1e4, factor=3.0),
        dict(rope_type="yarn", rope_theta=1e4, factor=3.0, original_max_position_embeddings=ORIGINAL),
        dict(
            rope_type="llama3", rope_theta=1e4, factor=3.0, original_max_position_embeddings=ORIGINAL,
            low_freq_factor=1.0, high_freq_factor=4.0,
        ),
    ],
    ids=lambda p: p["rope_type"],
)  # fmt: skip
def test_scaling_that_is_the_same_at_every_length_is_not_touched(parameters: dict[str, Any]) -> None:
    model = random_model(small("llama", num_hidden_layers=1, rope_parameters=parameters))
    with regime.fixed(model, LONG) as found:
        assert found == []
        assert "forward" not in vars(model.get_submodule("model.rotary_emb"))


class _Odd(nn.Module):
    """Takes position_ids, and is no rotary embedding."""

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        raise ValueError


class _Table(nn.Module):
    """Learned positions: it has parameters, so it stays in the graph whatever it does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 4))

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        return self.weight[position_ids % len(position_ids)]


@pytest.mark.parametrize("kind", [_Odd, _Table, nn.Identity])
def test_other_modules_are_not_touched(kind: type[nn.Module]) -> None:
    with regime.fixed(nn.ModuleList([kind()]), LONG) as found:
        assert found == []


def test_a_table_is_made_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = _models("dynamic")
    module = model.get_submodule("model.rotary_emb")
    whole = regime._table(module, {}, LONG)
    monkeypatch.setattr(regime, "_ROWS", 16)
    for a, b in zip(whole, regime._table(module, {}, LONG), strict=True):
        assert len(a) == LONG
        torch.testing.assert_close(a, b)
