"""The graph under construction: in go ops on values by name, out come typed values, weights, and the graph."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from planc.compiler.ir.graph import Graph, Node, Value, Weight
from planc.compiler.ir.ops import OPS
from planc.compiler.ir.recipe import Recipe, constant, evaluate, infer, step
from planc.compiler.ir.types import Attr, TensorType

# Ops that only move bytes: on weights alone they become recipe steps, so no step of the model runs them.
MOVES = frozenset({"reshape", "transpose", "slice", "concat", "copy"})

INPUTS = (
    Value("ids", TensorType("i32", ("T",))),
    Value("positions", TensorType("i32", ("T",))),
    Value("slots", TensorType("i32", ("T",))),
    Value("page_table", TensorType("i32", ("S", "M"))),
    Value("query_start", TensorType("i32", ("S1",))),
    Value("logit_rows", TensorType("i32", ("R",))),
)


class Builder:
    """Grows a graph node by node. Names are unique; equal recipes share one weight."""

    def __init__(self) -> None:
        self.types: dict[str, TensorType] = {v.name: v.type for v in INPUTS}
        self.made_by: dict[str, Node] = {}
        self.numbered = False  # whether the model numbers its tokens itself
        self._constants: dict[str, np.ndarray] = {}
        self._arrays: dict[str, np.ndarray | None] = {}
        self._nodes: list[Node] = []
        self._weights: dict[Recipe, Value] = {}
        self._recipes: dict[str, Recipe] = {}
        self._counts = {"logits": 1, "kv": 1}  # names that are taken from the start
        self._layers = 0

    def emit(self, op: str, inputs: Sequence[str], name: str, loc: str, **attrs: Attr) -> tuple[Value, ...]:
        """The outputs of a new node, or a weight when only weights' bytes move. ValueError when types do not fit."""
        if op in MOVES and all(i in self._recipes for i in inputs):
            return (self.weight(f"{inputs[0]}.{op}", step(op, *(self._recipes[i] for i in inputs), **attrs)),)
        made = OPS[op].infer(attrs, [self.types[i] for i in inputs])
        values = tuple(Value(self._unique(name), t) for t in made)
        node = Node(op, tuple(inputs), values, tuple(attrs.items()), loc)
        self._nodes.append(node)
        self.made_by |= {v.name: node for v in values}
        self.types |= {v.name: v.type for v in values}
        return values

    def weight(self, name: str, recipe: Recipe) -> Value:
        """The weight that `recipe` makes."""
        if recipe not in self._weights:
            value = Value(self._unique(name), infer(recipe))
            self._weights[recipe] = value
            self._recipes[value.name] = recipe
            self.types[value.name] = value.type
        return self._weights[recipe]

    def constant(self, name: str, array: np.ndarray) -> Value:
        """A weight that the compiler computed: its recipe names the digest of its bytes, dtype and shape."""
        recipe, entry = constant(array)
        self._constants |= entry
        return self.weight(name, recipe)

    def array(self, name: str) -> np.ndarray | None:
        """The value of a constant, or of what is computed from constants alone; None when tokens or weights decide."""
        if name not in self._arrays:
            self._arrays[name] = self._value(name)
        return self._arrays[name]

    def _value(self, name: str) -> np.ndarray | None:
        recipe, node = self._recipes.get(name), self.made_by.get(name)
        if recipe is not None:
            return None if recipe.loads else evaluate(recipe, _no_read, self._constants)
        if node is None:
            return None
        args = [self.array(i) for i in node.inputs]
        if any(a is None for a in args):
            return None
        out = OPS[node.op].ref(dict(node.attrs), args, [self.types[i] for i in node.inputs])  # type: ignore[arg-type]
        return out[[v.name for v in node.outputs].index(name)]

    def next_layer(self) -> int:
        """0, 1, 2 ...: one number for each attention op, in order."""
        self._layers += 1
        return self._layers - 1

    def graph(self, name: str, output: str) -> Graph:
        """The graph whose one output is the value `output`, renamed `logits`, without dead nodes and weights."""
        nodes = tuple(_renamed(n, output, "logits") for n in self._nodes)
        weights = tuple(Weight(v, r) for r, v in self._weights.items())
        cache = Value("kv", TensorType("u8", ("P", 0)))
        graph = Graph(name, (*INPUTS, cache), weights, nodes, ("logits",)).without_dead()
        leaves = {str(r.get("digest")) for w in graph.weights for r in w.recipe.leaves() if r.op == "const"}
        return replace(graph, constants={k: v for k, v in self._constants.items() if k in leaves})

    def _unique(self, name: str) -> str:
        count = self._counts[name] = self._counts.get(name, name in self.types) + 1
        return name if count == 1 else self._unique(f"{name}.{count}")


def _no_read(name: str) -> np.ndarray:
    raise KeyError(name)


def _renamed(node: Node, old: str, new: str) -> Node:
    if old not in node.inputs and all(v.name != old for v in node.outputs):
        return node
    inputs = tuple(new if i == old else i for i in node.inputs)
    outputs = tuple(Value(new, v.type) if v.name == old else v for v in node.outputs)
    return Node(node.op, inputs, outputs, node.attrs, node.loc)
