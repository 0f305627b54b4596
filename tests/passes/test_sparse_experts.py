"""Experts that all run with gates of zero: only the chosen run afterwards, unless a zero gate does not give zero."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from planc.compiler import gates
from planc.compiler.coverage.small import small
from planc.compiler.ir import interp
from planc.compiler.ir.graph import Graph, Node
from planc.passes import pipeline
from planc.passes.fold import fold
from planc.passes.sparse_experts import dense, sparse_experts
from tests.passes.test_pipeline import options


@pytest.fixture(scope="module")
def made() -> gates.Small:
    config = small("llama4_text")
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return gates._lifted(config, gates.random_model(config), False, None)


def prepared(graph: Graph) -> Graph:
    """The graph as the pass meets it."""
    return pipeline.run(graph, options(), pipeline=(pipeline.Pass(fold),))[0]


def logits(made: gates.Small, graph: Graph) -> np.ndarray:
    state = made.model.state_dict()
    weights = interp.weights_of(graph, lambda name: state[name].numpy(), graph.constants)
    given = {"ids": np.arange(4, 30), "positions": np.arange(26), "logit_rows": np.array([25, 3])}
    return interp.run(graph, {k: v.astype(np.int32) for k, v in given.items()}, weights)["logits"]


def test_only_the_chosen_experts_run(made: gates.Small) -> None:
    before = prepared(made.graph)
    after, count = sparse_experts(before, options())
    assert count == len(dense(before)) > 0
    assert not dense(after)
    experts = [n for n in after.nodes if n.op == "expert_linear"]
    assert {n.out.type.shape[1] for n in experts} == {made.model.config.num_experts_per_tok}
    want = logits(made, before)
    assert np.abs(logits(made, after) - want).max() <= 1e-6 * np.abs(want).max()


@pytest.mark.parametrize(("old", "new"), [("sigmoid", "tanh"), ("silu", "sigmoid")])
def test_a_zero_that_does_not_stay_zero_keeps_all_experts(made: gates.Small, old: str, new: str) -> None:
    def changed(n: Node) -> Node:
        return replace(n, op=new) if n.op == old and (old == "sigmoid" or len(n.out.type.shape) == 3) else n

    before = prepared(made.graph.map_nodes(changed))
    after, count = sparse_experts(before, options())
    assert (after, count) == (before, 0)
