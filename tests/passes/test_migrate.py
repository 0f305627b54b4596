"""Scales that move from activations to weights: where they may, and that the graph computes what it computed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planc.compiler.ir.graph import Graph, Node, Value, Weight
from planc.compiler.ir.interp import run
from planc.compiler.ir.recipe import evaluate, infer, load, step
from planc.compiler.ir.types import TensorType
from planc.passes import pipeline
from planc.passes.choices import Choices
from planc.passes.migrate import migrate, scaled
from planc.passes.sites import sites, weight_of
from tests.lifted import Lifted, lifted, logits, relative_error
from tests.models import tiny
from tests.passes.test_pipeline import options

FIRST = [p.name for p in pipeline.PIPELINE].index("migrate")
ROWS = [40, 3, 7]
# Sites a layer (of two; the final norm scales an untied head): norm -> q k v, v -> o, norm -> gate up, up -> down.
EXPECTED = {
    "llama": 2 * 4 + 1,
    "qwen2": 2 * 4 + 1,
    "gemma2": 2 * 4,  # the head is the embedding
    "gemma3_text": 2 * 4,
    "phi3": 2 * 4 + 1,
    "gpt_neox": 2 * 3 + 1,  # gelu(x) * s is not gelu(x * s)
    "gpt2": 2 * 3,
    "mixtral": 2 * 4 + 1,
}


def model(arch: str, path: Path, **config) -> Lifted:
    made = lifted(tiny(arch, path, **config))
    graph, _ = pipeline.run(made.graph, options(), pipeline=pipeline.PIPELINE[:FIRST])
    return replace(made, graph=graph)


def random_scales(graph: Graph) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {s.name: np.exp(rng.standard_normal(s.size)).astype(np.float32) for s in sites(graph)}


def migrated(graph: Graph, scales: dict[str, np.ndarray]) -> tuple[Graph, int]:
    after, log = pipeline.run(graph, options(choices=Choices(scales)), pipeline=pipeline.PIPELINE[FIRST : FIRST + 1])
    return after, log[0].matches


@pytest.mark.parametrize("arch", EXPECTED)
def test_the_graph_computes_what_it_computed(arch: str, tmp_path: Path) -> None:
    made = model(arch, tmp_path)
    after, count = migrated(made.graph, random_scales(made.graph))
    assert count == EXPECTED[arch]
    ids = np.random.default_rng(0).integers(3, 300, 41)
    before = logits(made, made.graph, ids, ROWS)
    assert relative_error(logits(made, after, ids, ROWS), before) < 1e-5
    read = made.source.read
    for site in sites(made.graph):
        for reader in site.readers:
            name = weight_of(reader.node)
            w, new = (evaluate(g.weight_by_name[name].recipe, read, g.constants) for g in (made.graph, after))
            assert np.abs(new / np.where(w == 0, 1, w) - 1).max() > 0.5, f"{name} is not scaled"


def test_grouped_heads_share_the_scales_of_their_values(tmp_path: Path) -> None:
    made = model("llama", tmp_path)
    site = next(s for s in sites(made.graph) if s.readers[0].node.out.name == "l0.self_attn.o_proj")
    assert site.size == 32  # two heads of 16 for the values, read by four
    assert (site.rows == np.arange(96, 128)).all()  # behind q and k
    units = np.arange(32).reshape(2, 16)
    assert (site.readers[0].units == np.concatenate([units[0], units[0], units[1], units[1]])).all()


def test_without_choices_nothing_changes(tmp_path: Path) -> None:
    made = model("qwen2", tmp_path)
    assert migrated(made.graph, {}) == (made.graph, 0)


def test_a_norm_without_weight_gets_one(tmp_path: Path) -> None:
    made = model("olmo", tmp_path)
    norm = next(s for s in sites(made.graph) if s.rows is None)
    assert len(norm.maker.inputs) == (2 if norm.maker.op.startswith("add_") else 1)
    after, _ = migrated(made.graph, random_scales(made.graph))
    ids = np.random.default_rng(0).integers(3, 300, 41)
    assert relative_error(logits(made, after, ids, ROWS), logits(made, made.graph, ids, ROWS)) < 1e-5


def small(*nodes: Node, outputs: tuple[str, ...] = ("y",)) -> Graph:
    x = Value("x", TensorType("f32", ("T", 8)))
    shapes = {"g": (8,), "w": (8, 8), "v": (8, 8)}
    weights = tuple(Weight(Value(n, TensorType("f32", s)), load(n, "f32", s)) for n, s in shapes.items())
    read = {i for n in nodes for i in n.inputs}
    return Graph("small", (x,), tuple(w for w in weights if w.name in read), nodes, outputs)


def value(name: str) -> Value:
    return Value(name, TensorType("f32", ("T", 8)))


NORM = Node("rms_norm", ("x", "g"), (value("n"),), (("eps", 1e-6),))
LINEAR = Node("linear", ("n", "w"), (value("y"),))


def test_a_norm_that_something_else_reads_keeps_its_scale() -> None:
    assert [s.name for s in sites(small(NORM, LINEAR))] == ["n"]
    other = Node("add", ("n", "y"), (value("z"),))
    assert sites(small(NORM, LINEAR, other, outputs=("z",))) == []
    assert sites(small(NORM, LINEAR, outputs=("y", "n"))) == []


def test_a_weight_that_two_products_read_keeps_its_scale() -> None:
    again = Node("linear", ("y", "w"), (value("z"),))
    assert sites(small(NORM, LINEAR, again, outputs=("z",))) == []


@pytest.mark.parametrize(
    ("op", "attrs", "found"), [("relu", (), ["m"]), ("silu", (), []), ("mul", (("scalar", 2.0),), ["m"])]
)
def test_only_what_keeps_a_factor_lets_it_pass(op: str, attrs: tuple, found: list[str]) -> None:
    nodes = (
        Node("linear", ("x", "w"), (value("h"),)),
        Node(op, ("h",), (value("m"),), attrs),
        Node("linear", ("m", "v"), (value("y"),)),
    )
    graph = small(*nodes)
    assert [s.name for s in sites(graph)] == found
    arrays = {n: np.random.default_rng(i).standard_normal((8, 8)).astype(np.float32) for i, n in enumerate("wvx")}
    s = np.linspace(0.5, 2, 8).astype(np.float32)
    after, count = migrate(graph, options(choices=Choices({"m": s})))
    assert count == len(found)
    weights = {w.name: evaluate(w.recipe, arrays.__getitem__, after.constants) for w in after.weights}
    want = run(graph, {"x": arrays["x"]}, arrays)["y"]
    assert relative_error(run(after, {"x": arrays["x"]}, weights)["y"], want) < 1e-6


def test_a_norm_weight_that_other_norms_read_is_not_changed_for_them() -> None:
    other = Node("rms_norm", ("y", "g"), (value("z"),), (("eps", 1e-6),))
    graph = small(NORM, LINEAR, other, outputs=("z",))
    after, count = migrate(graph, options(choices=Choices({"n": np.full(8, 2, np.float32)})))
    assert count == 1
    assert sorted(w.name for w in after.weights) == ["g", "g.of.n", "w"]
    assert after.weight_by_name["g"].recipe.op == "load"


def test_a_stack_is_scaled_matrix_by_matrix() -> None:
    """A factor goes below the moves, down to each tensor, or a stack of experts would have to be made at once."""
    parts = [step("reshape", load(f"e{i}", "bf16", (6, 4)), shape=(1, 6, 4)) for i in range(3)]
    turned = step("transpose", step("concat", *parts, axis=0), perm=(0, 2, 1))
    constants: dict[str, np.ndarray] = {}
    rows, columns = np.arange(1, 5, dtype=np.float32)[:, None], np.arange(1, 7, dtype=np.float32)
    made = scaled(scaled(turned, columns, constants), rows, constants)
    assert infer(made).shape == (3, 4, 6)
    assert [r.op for r in made.inputs[0].inputs] == ["reshape"] * 3
    import ml_dtypes

    arrays = {f"e{i}": np.random.default_rng(i).standard_normal((6, 4)).astype(ml_dtypes.bfloat16) for i in range(3)}
    want = np.stack([arrays[f"e{i}"].astype(np.float32).T for i in range(3)]) * rows * columns
    np.testing.assert_allclose(evaluate(made, arrays.__getitem__, constants), want, rtol=1e-6)


@pytest.mark.parametrize("biased", [False, True])
def test_a_product_gains_its_offset_where_its_weight_is_clipped(biased: bool) -> None:
    attrs, more = ((("bias", True),), ("g",)) if biased else ((), ())
    graph = small(Node("linear", ("x", "w", *more), (value("y"),), attrs))
    arrays = {n: np.random.default_rng(i).standard_normal((8, 8)).astype(np.float32) for i, n in enumerate("wx")}
    arrays["g"] = arrays["w"][0]
    offset = np.linspace(-1, 1, 8).astype(np.float32)
    none = migrate(graph, options(choices=Choices(offsets={"y": offset})))[0]
    assert none == graph
    after, _ = migrate(graph, options(choices=Choices(clips={"w": offset}, offsets={"y": offset})))
    assert migrate(graph, options(choices=Choices(shifts={"w": offset}, offsets={"y": offset})))[0] == after
    weights = {w.name: evaluate(w.recipe, arrays.__getitem__, after.constants) for w in after.weights}
    got, want = (run(g, {"x": arrays["x"]}, w)["y"] for g, w in ((after, weights), (graph, arrays)))
    np.testing.assert_allclose(got, want + offset, rtol=1e-5, atol=1e-5)


def test_an_offset_is_added_after_the_rows_are_scaled() -> None:
    """It is what the results lack as they are after `migrate`."""
    nodes = (
        Node("linear", ("x", "w", "g"), (value("h"),), (("bias", True),)),
        Node("linear", ("h", "v"), (value("y"),)),
    )
    graph, offset = small(*nodes), np.ones(8, np.float32)
    choices = Choices({"h": np.full(8, 2, np.float32)}, {"w": offset}, {"h": offset})
    after, _ = migrate(graph, options(choices=choices))
    arrays = {"g": np.full(8, 6, np.float32)}
    bias = after.producers["h"].inputs[2]
    np.testing.assert_array_equal(evaluate(after.weight_by_name[bias].recipe, arrays.__getitem__, after.constants), 4)
