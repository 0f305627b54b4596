"""One type's row: right plans are ok, wrong ones WRONG, refusals and encoders told as such."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from planc.compiler.coverage import check as module
from planc.compiler.coverage.check import EXCLUDED, OK, REFUSED, WRONG, check
from planc.compiler.coverage.types import ModelType
from planc.errors import PlancError


def test_a_right_plan_is_ok() -> None:
    row = check(ModelType("qwen3"))
    assert (row.verdict, row.tokens, row.kinds) == (OK, "equal", "full, sliding")
    assert row.error is not None
    assert row.error < 1e-5


def test_a_wrong_plan_is_wrong(monkeypatch: Any) -> None:
    build = module._build

    def with_a_changed_norm(model: Path, plan: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        tensors["model.norm.weight"] = tensors["model.norm.weight"] * np.float32(1.01)
        save_file(tensors, model / "model.safetensors", {"format": "pt"})
        build(model, plan)

    monkeypatch.setattr(module, "_build", with_a_changed_norm)
    row = check(ModelType("llama"))
    assert row.verdict == WRONG
    assert row.error is not None
    assert row.error == pytest.approx(0.01, rel=0.1)


def test_a_refusal_keeps_its_first_line(monkeypatch: Any) -> None:
    def refuse(model: Path, plan: Path) -> None:
        raise PlancError(f"{model}: an op that is not known. {module.NEXT_STEP}")

    monkeypatch.setattr(module, "_build", refuse)
    row = check(ModelType("llama"))
    assert (row.verdict, row.detail) == (REFUSED, "model: an op that is not known.")


def test_attention_to_the_future_shows() -> None:
    assert check(ModelType("bert")).verdict == EXCLUDED


class Flips(torch.nn.Module):
    """Rows that the last token reaches by rounding alone, and a choice that turns on it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(8e4))

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        large = self.scale * input_ids[:, -1:]
        tenth = (0.1 + large) - large  # but for rounding
        chosen = (tenth > 0.1001).to(tenth.dtype)
        return SimpleNamespace(logits=torch.stack([1 + chosen.expand(input_ids.shape), input_ids / 10], -1))


def test_a_choice_that_rounding_flips_is_not_the_future(monkeypatch: Any) -> None:
    model, prompt = Flips(), torch.arange(4, 12)
    assert not module._sees_ahead(model, prompt)
    monkeypatch.setattr(module, "doubled", lambda model, prompt: model)
    assert module._sees_ahead(model, prompt)  # as float32 has it


def test_a_model_with_a_recurrent_state_is_a_decoder() -> None:
    row = check(ModelType("minimax"))
    assert row.verdict == REFUSED
    assert "keeps a recurrent state" in row.detail


def test_tokens_that_differ_are_a_tie_only_where_the_logits_are() -> None:
    want = torch.tensor([[0.0, 1.0, 1.0 - 1e-6], [2.0, 1.0, 0.0]])
    assert module._tokens([1, 0], want) == "equal"
    assert module._tokens([2, 0], want) == "tie"
    assert module._tokens([2, 1], want) == "differ"


def test_nan_is_wrong() -> None:
    assert module._judged("x", [0.0, float("nan")], ["equal"]).verdict == WRONG
