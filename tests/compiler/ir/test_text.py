"""The text form round-trips, and the verifier refuses hand-broken graphs with the right words."""

from dataclasses import replace

import pytest

from planc.compiler.ir.graph import Graph, Node, Value, Weight
from planc.compiler.ir.recipe import load, step
from planc.compiler.ir.text import parse, to_text
from planc.compiler.ir.types import TensorType
from planc.compiler.ir.verify import verify
from planc.errors import PlancError

X = Value("x", TensorType("f32", ("T", 8)))
RECIPE = step("pack", load("a.b", "bf16", (12, 8)), layout="n64k2")
W = Weight(Value("l0.q.w", TensorType("bf16", (12, 8), "n64k2")), RECIPE)
LINEAR = Node("linear", ("x", "l0.q.w"), (Value("y", TensorType("f32", ("T", 12)), 128),), (), "layers.0.q")
VIEW = Node("slice", ("y",), (Value("z", TensorType("f32", ("T", 4), "strides:12")),),
            (("axis", 1), ("start", 2), ("stop", 6)), "layers.0")  # fmt: skip
SCALE = Node("mul", ("z",), (Value("o", TensorType("f32", ("T", 4))),), (("scalar", 1e-05), ("reversed", True)))
GRAPH = Graph("step", (X,), (W,), (LINEAR, VIEW, SCALE), ("o",))


def test_printing_then_parsing_gives_an_equal_graph() -> None:
    assert parse(to_text(GRAPH)) == GRAPH
    assert to_text(parse(to_text(GRAPH))) == to_text(GRAPH)


def test_the_text_says_what_the_graph_holds() -> None:
    text = to_text(GRAPH)
    assert "%y: f32[T, 12] at 0x80 = linear(%x, %l0.q.w)  # layers.0.q" in text
    assert "%z: f32[T, 4]@strides:12 = slice(%y, axis=1, start=2, stop=6)" in text


@pytest.mark.parametrize(
    ("line", "message"),
    [("  %q: f32[T, 12] = linear(%x", "line 3"), ("  %q: f99[T] = neg(%x)", "f99"), ("  %q: f32[Q] = neg(%x)", "'Q'")],
)
def test_a_broken_line_is_named(line: str, message: str) -> None:
    lines = to_text(GRAPH).splitlines()
    lines[2] = line
    with pytest.raises(ValueError, match=message):
        parse("\n".join(lines))


def with_nodes(*nodes: Node) -> Graph:
    return replace(GRAPH, nodes=nodes, outputs=(nodes[-1].out.name,))


BROKEN = [
    (with_nodes(replace(LINEAR, op="lineer")), "no such op"),
    (with_nodes(replace(LINEAR, inputs=("x", "nothing"))), "reads %nothing before it is made"),
    (with_nodes(replace(LINEAR, inputs=("x",))), "linear"),
    (with_nodes(VIEW, LINEAR), "reads %y before"),
    (with_nodes(LINEAR, LINEAR), "%y is defined twice"),
    (with_nodes(replace(LINEAR, outputs=(Value("y", TensorType("f32", ("T", 13))),))), "declared"),
    (with_nodes(LINEAR, replace(VIEW, attrs=(("axis", 1), ("start", 2)))), "missing attributes"),
    (with_nodes(LINEAR, VIEW.with_attrs(colour=3)), "unknown attributes"),
    (with_nodes(LINEAR, VIEW.with_attrs(stop=13)), "slice 2:13"),
    (replace(GRAPH, outputs=("nowhere",)), "output %nowhere"),
    (replace(GRAPH, weights=(replace(W, recipe=load("a.b", "bf16", (12, 8))),)), "recipe of weight %l0.q.w"),
    (replace(GRAPH, inputs=(replace(X, type=TensorType("f32", ("T", 9))),)), "does not fit"),
]


@pytest.mark.parametrize(("graph", "message"), BROKEN, ids=[m for _, m in BROKEN])
def test_the_verifier_names_what_is_broken(graph: Graph, message: str) -> None:
    verify(GRAPH, "before")
    with pytest.raises(PlancError, match=r"^fuse: ") as e:
        verify(graph, "fuse")
    assert message in str(e.value)


def test_rewrite_drops_what_nothing_needs() -> None:
    smaller = GRAPH.rewrite({SCALE: None}, rename={"o": "x"})
    assert smaller.nodes == ()
    assert smaller.weights == ()
    assert smaller.outputs == ("x",)
