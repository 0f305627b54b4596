"""A graph in stretches of nodes over windows of text: the same values as the interpreter's, and weights by parts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planc.compiler.calibrate import run as module
from planc.compiler.calibrate.run import Weights, run, stretches
from planc.compiler.ir.graph import Graph, Value, Weight
from planc.compiler.ir.interp import execute, weights_of
from planc.compiler.ir.recipe import constant, infer, load
from planc.errors import PlancError
from planc.passes import pipeline
from planc.passes.sites import PRODUCTS
from tests.lifted import Lifted, inputs, lifted
from tests.models import tiny
from tests.passes.test_pipeline import options

FIRST = [p.name for p in pipeline.PIPELINE].index("migrate")


def model(arch: str, path: Path) -> Lifted:
    made = lifted(tiny(arch, path))
    return replace(made, graph=pipeline.run(made.graph, options(), pipeline=pipeline.PIPELINE[:FIRST])[0])


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt_neox", "mixtral"])
@pytest.mark.parametrize("held", [1, 40_000, 1 << 28])
def test_products_see_what_the_interpreter_gives_them(
    arch: str, held: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HELD", held)
    made = model(arch, tmp_path)
    graph, rng = made.graph, np.random.default_rng(0)
    windows = [rng.integers(3, 300, n).astype(np.int32) for n in (20, 33)]
    products = [n for n in graph.nodes if n.op in PRODUCTS]
    weights = Weights(graph, made.source.read, made.source.read_rows)
    seen: dict[str, list[np.ndarray]] = {}
    plan = stretches(graph, products, held)
    assert (len(plan) == 1) == (held > 40_000)
    done = list(run(graph, windows, plan, weights, lambda n, x: seen.setdefault(n.out.name, []).append(x.copy())))
    assert len(done) == len(plan)
    assert list(seen) == [n.out.name for n in products]
    arrays = weights_of(graph, made.source.read, graph.constants)
    for at, ids in enumerate(windows):
        env = {**inputs(graph, ids, list(range(len(ids)))), **arrays}
        for n in graph.nodes:
            if n.op in PRODUCTS:
                np.testing.assert_allclose(seen[n.out.name][at], env[n.inputs[0]], rtol=1e-4, atol=1e-4)
            execute(n, env, graph)


def test_constants_of_the_model_may_be_infinite_and_its_tensors_not() -> None:
    mask = np.array([0, -np.inf], np.float32)
    leaf, constants = constant(mask)
    given = (Weight(Value("mask", infer(leaf)), leaf), Weight(Value("w", infer(leaf)), load("w", "f32", (2,))))
    weights = Weights(Graph("g", (), given, (), (), constants), lambda name: mask)
    np.testing.assert_array_equal(weights.array("mask"), mask)
    with pytest.raises(PlancError, match=r"the weight w holds NaN or infinity \(tensors: w\)"):
        weights.array("w")


def test_between_stretches_only_what_is_read_later_is_kept(tmp_path: Path) -> None:
    graph = model("llama", tmp_path).graph
    products = [n for n in graph.nodes if n.op in PRODUCTS]
    plan = stretches(graph, products, 160_000)  # a layer has 122,880 bytes of weights
    assert len(plan) > 2
    assert [n for s in plan for n in s.nodes] == [n for n in graph.nodes if n in {n for s in plan for n in s.nodes}]
    for s in plan[:-1]:
        kept = sum(graph.types[name].features for name in s.kept if graph.types[name].dtype == "f32")
        assert kept <= 2 * 64  # the residual, and what the norm made of it
    assert plan[-1].kept == {"positions"}


def test_a_layer_that_nothing_wanted_needs_does_not_run(tmp_path: Path) -> None:
    graph = model("llama", tmp_path).graph
    first = next(n for n in graph.nodes if n.op in PRODUCTS)
    (stretch,) = stretches(graph, [first])
    assert [n.op for n in stretch.nodes] == ["embedding", "rms_norm", "linear"]


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    made = model("llama", tmp_path)

    def read(name: str) -> np.ndarray:
        array = made.source.read(name)
        if name == "model.layers.1.mlp.down_proj.weight":
            array[3, 5] = np.nan
        return array

    products = [n for n in made.graph.nodes if n.op in PRODUCTS]
    with pytest.raises(PlancError, match=r"NaN or infinity \(tensors: model\.layers\.1\.mlp\.down_proj\.weight\)"):
        list(
            run(
                made.graph,
                [np.arange(9)],
                stretches(made.graph, products),
                Weights(made.graph, read),
                lambda n, x: None,
            )
        )
