"""The experts hook: expert layers of every kind that transformers knows become sparse ops of the same result."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.models.mixtral import modeling_mixtral

from planc.compiler import hooks
from planc.compiler.coverage.small import small
from planc.compiler.lift import lift
from planc.compiler.trace import capture, trace
from tests.compiler.lift import capture as bodies
from tests.compiler.lift.capture import recipes, run

EXPERTS, WIDTH, INNER = 3, 24, 10


class _Experts(nn.Module):
    """Experts with or without gate, bias, a norm after them, and weights stored across."""

    def __init__(self, gate: bool, bias: bool, across: bool, norm: bool) -> None:
        super().__init__()
        self.has_gate, self.has_bias, self.is_transposed, self.has_post_expert_norm = gate, bias, across, norm
        torch.manual_seed(0)
        name, first = ("gate_up_proj", 2 * INNER) if gate else ("up_proj", INNER)
        for own, shape in ((name, (first, WIDTH)), ("down_proj", (WIDTH, INNER))):
            size = (EXPERTS, *(shape[::-1] if across else shape))
            self.register_parameter(own, nn.Parameter(torch.randn(size) / 4))
            if bias:
                self.register_parameter(f"{own}_bias", nn.Parameter(torch.randn(EXPERTS, shape[0])))
        self.act_fn = nn.SiLU()
        if norm:
            self.post_expert_norm = nn.LayerNorm(WIDTH, elementwise_affine=False)

    def _apply_gate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return self.act_fn(gate) * (up + 1)

    def _linear(self, name: str, x: Tensor, expert: int) -> Tensor:
        w = getattr(self, name)[expert]
        bias = getattr(self, f"{name}_bias")[expert] if self.has_bias else 0
        return (x @ w if self.is_transposed else x @ w.T) + bias

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [N, D], through the hook on meta and one expert at a time elsewhere."""
        if x.is_meta:
            return hooks.experts(self, x, ids, weights)
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            y = self._linear("gate_up_proj" if self.has_gate else "up_proj", x, expert)
            y = self._apply_gate(y) if self.has_gate else self.act_fn(y)
            y = self._linear("down_proj", y, expert)
            y = self.post_expert_norm(y) if self.has_post_expert_norm else y
            out += y * (weights * (ids == expert)).sum(-1, keepdim=True)
        return out


class _Model(nn.Module):
    def __init__(self, *flags: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(bodies._Parts().table.detach().clone())
        self.experts = _Experts(*flags)


class _Step(nn.Module):
    def __init__(self, *flags: bool) -> None:
        super().__init__()
        self.model = _Model(*flags)

    def forward(self, ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
        x = nn.functional.embedding(ids, self.model.table)[0]
        weights, chosen = x[:, :EXPERTS].softmax(-1).topk(2, -1)
        return self.model.experts(x, chosen, weights)[None][:, logit_rows]


@pytest.mark.parametrize("flags", product([True, False], repeat=4), ids=lambda f: "".join("01"[b] for b in f))
def test_experts_of_every_kind(flags: tuple[bool, ...]) -> None:
    with torch.no_grad():
        theirs = _Step(*flags)(*bodies._inputs())[0].numpy()
        traced = capture("experts", _Step(*flags).to("meta"), {}, tokens=9)
    graph = lift(traced, recipes(traced.module))
    assert [n.op for n in graph.nodes if "expert" in n.op or n.op == "weighted_sum"] == [
        "expert_linear",
        "expert_linear",
        "weighted_sum",
    ]
    ours = run(graph, dict(_Step(*flags).model.named_parameters()), *bodies._inputs())
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_gate_of_the_models_own_stays_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies between the two layers of experts is traced as it is written."""
    experts = next(m for m in vars(modeling_mixtral).values() if getattr(m, "__name__", "") == "MixtralExperts")

    def gate(self: Any, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return a.clamp(max=0.5).erf() * b

    monkeypatch.setattr(experts, "_apply_gate", gate)
    traced = trace(small("mixtral", num_hidden_layers=1))
    graph = lift(traced, recipes(traced.module))
    first = next(n for n in graph.nodes if n.op == "expert_linear")
    assert {"minimum", "erf"} <= {n.op for n in graph.nodes[graph.nodes.index(first) :]}
    assert "silu" not in {n.op for n in graph.nodes}
