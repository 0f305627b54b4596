"""Loops over experts: traced once for all that are alike, right by numbers, refused where they are not understood."""

import pytest
import torch
from transformers.models.dbrx import modeling_dbrx

from planc.compiler import gates
from planc.compiler.coverage.small import small
from planc.compiler.trace import trace
from planc.errors import PlancError


@pytest.mark.parametrize("arch", ["dbrx", "longcat_flash"])
def test_a_loop_becomes_sparse_experts(arch: str) -> None:
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = small(arch)
        made = gates._lifted(config, gates.random_model(config), False, None)
        assert gates._check(made) <= 1e-5
    ids = {n.inputs[1] for n in made.graph.nodes if n.op == "expert_linear"}
    assert ids
    assert not ids & set(made.graph.weight_by_name), "experts are chosen for each token"


def test_a_loop_that_does_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = modeling_dbrx.DbrxExpertGLU.forward
    changed = lambda self, x, w, v, u: original(self, x, w, v, torch.exp(u))  # noqa: E731
    monkeypatch.setattr(modeling_dbrx.DbrxExpertGLU, "forward", changed)
    with pytest.raises(PlancError, match=r"a loop over experts calls exp|tracing stopped"):
        trace(small("dbrx"))
