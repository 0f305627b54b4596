"""The text form round-trips, and the verifier refuses hand-broken graphs with the right words."""

from dataclasses import replace

import pytest

from planc.compiler.ir import text
from planc.compiler.ir.graph import Graph, Node, Value, Weight
from planc.compiler.ir.recipe import Recipe, load, step
from planc.compiler.ir.text import Recipes, parse, recipe_text, to_text
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


RECIPES = [
    load("it's", "bf16", (12, 8)),
    load('a "quoted" \\ name, (odd)=1', "bf16", (1,)),
    step("mul", step("transpose", load("a", "f32", (2, 3)), perm=(1, 0)), scalar=-1e-05, reversed=True),
    step("clamp", load("a", "f32", ()), high=float("inf"), low=float("-inf")),
    step("concat", *(load(f"experts.{i}", "bf16", (4, 4)) for i in range(300)), axis=0),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=[r.op for r in RECIPES])
def test_any_recipe_parses_back(recipe: Recipe) -> None:
    graph = replace(GRAPH, weights=(replace(W, recipe=recipe),))
    (parsed,) = parse(to_text(graph)).weights
    assert parsed.recipe == recipe
    assert [type(v) for _, v in parsed.recipe.attrs] == [type(v) for _, v in recipe.attrs]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("load(name='a'", "neither"),
        ("load(name='a') b", "more than a recipe"),
        ("neg(axis=1, load(name='a'))", "not an attribute"),
        ("neg(load(name='a')load(name='b'))", "neither"),
        ("'a'", "a recipe is a call"),
        ("load(name=a)", "line 2"),
    ],
)
def test_a_broken_recipe_is_refused(broken: str, message: str) -> None:
    lines = to_text(GRAPH).splitlines()
    lines[1] = lines[1].partition(" = ")[0] + f" = {broken}"
    with pytest.raises(ValueError, match=message):
        parse("\n".join(lines))


def test_a_recipe_goes_through_its_text_once_a_build(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[Recipe] = []

    def told(recipe: Recipe) -> str:
        printed.append(recipe)
        return recipe_text(recipe)

    monkeypatch.setattr(text, "recipe_text", told)
    recipes = Recipes()
    verify(GRAPH, "before", recipes)
    equal = Weight(replace(W.value, name="more"), step("pack", load("a.b", "bf16", (12, 8)), layout="n64k2"))
    verify(replace(GRAPH, weights=(W, equal)), "after", recipes)
    assert printed == [RECIPE, RECIPE.inputs[0]]


def test_a_new_recipe_whose_text_says_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = Recipes()
    verify(GRAPH, "before", recipes)
    said = recipe_text(RECIPE)
    monkeypatch.setattr(text, "recipe_text", lambda recipe: said)
    other = step("pack", load("a.c", "bf16", (12, 8)), layout="n64k2")
    with pytest.raises(PlancError, match="after: the text form does not parse back"):
        verify(replace(GRAPH, weights=(replace(W, recipe=other),)), "after", recipes)
