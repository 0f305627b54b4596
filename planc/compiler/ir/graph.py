"""The graph: in go inputs, weights with their recipes and nodes in order, out come producers, users and rewrites."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from planc.compiler.ir.recipe import Recipe
from planc.compiler.ir.types import Attr, TensorType


@dataclass(frozen=True)
class Value:
    """A name, its type, and its byte address in the arena once planned."""

    name: str
    type: TensorType
    addr: int | None = None


@dataclass(frozen=True)
class Weight:
    """A value that is known before the first step, and the recipe that makes its bytes from the checkpoint."""

    value: Value
    recipe: Recipe

    @property
    def name(self) -> str:
        return self.value.name


@dataclass(frozen=True)
class Node:
    """One operation: `outputs = op(inputs, attrs)`, and the module path it came from."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[Value, ...]
    attrs: tuple[tuple[str, Attr], ...] = ()
    loc: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "attrs", tuple(sorted(self.attrs)))

    @property
    def out(self) -> Value:
        """The first output."""
        return self.outputs[0]

    def attr(self, name: str, default: Attr | None = None) -> Attr:
        """The attribute `name`; KeyError names the node when it is absent and no default is given."""
        for key, value in self.attrs:
            if key == name:
                return value
        if default is None:
            raise KeyError(f"{self.op} at {self.loc or 'top level'} has no attribute {name!r}")
        return default

    def with_attrs(self, **attrs: Attr) -> "Node":
        """A copy with these attributes set."""
        return replace(self, attrs=tuple((dict(self.attrs) | attrs).items()))


@dataclass(frozen=True)
class Graph:
    """Inputs, weights, nodes in execution order, and the names of the outputs. Names are unique (SSA).

    `constants` holds the arrays behind `const` recipes by the digest of their bytes; being named by content, they take
    no part in equality or in the text form.
    """

    name: str
    inputs: tuple[Value, ...]
    weights: tuple[Weight, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def types(self) -> Mapping[str, TensorType]:
        """Type of every value by name."""
        table = {v.name: v.type for v in self.inputs}
        table |= {w.name: w.value.type for w in self.weights}
        table |= {v.name: v.type for n in self.nodes for v in n.outputs}
        return table

    @cached_property
    def producers(self) -> Mapping[str, Node]:
        """The node that makes each value; inputs and weights have none."""
        return {v.name: n for n in self.nodes for v in n.outputs}

    @cached_property
    def order(self) -> Mapping[str, int]:
        """Position of each value: the index of the node that makes it, -1 for inputs and weights."""
        table = dict.fromkeys(self.types, -1)
        for i, n in enumerate(self.nodes):
            table |= {v.name: i for v in n.outputs}
        return table

    @cached_property
    def users(self) -> Mapping[str, tuple[Node, ...]]:
        """The nodes that read each value, in order, once each."""
        table: dict[str, list[Node]] = {name: [] for name in self.types}
        for n in self.nodes:
            for name in dict.fromkeys(n.inputs):
                table[name].append(n)
        return {k: tuple(v) for k, v in table.items()}

    @cached_property
    def weight_by_name(self) -> Mapping[str, Weight]:
        """Weights by value name."""
        return {w.name: w for w in self.weights}

    def rewrite(
        self,
        replaced: Mapping[Node, Node | Iterable[Node] | None],
        *,
        rename: Mapping[str, str] | None = None,
        add_weights: Iterable[Weight] = (),
        add_constants: Mapping[str, np.ndarray] | None = None,
    ) -> "Graph":
        """A copy where each key of `replaced` gives way to its nodes (None drops it) and inputs are renamed.

        `rename` maps a value's name to the one that its readers take instead; chains are followed. Dead nodes and
        unused weights are then removed, so a rewrite only says what is new.
        """
        names = rename or {}

        def final(name: str) -> str:
            while name in names:
                name = names[name]
            return name

        nodes: list[Node] = []
        for n in self.nodes:
            new = replaced.get(n, n) if n in replaced else n
            nodes.extend([] if new is None else [new] if isinstance(new, Node) else new)
        nodes = [replace(n, inputs=tuple(final(i) for i in n.inputs)) for n in nodes]
        outputs = tuple(final(o) for o in self.outputs)
        weights = tuple({w.name: w for w in (*self.weights, *add_weights)}.values())
        constants = {**self.constants, **(add_constants or {})}
        return replace(self, nodes=tuple(nodes), weights=weights, outputs=outputs, constants=constants).without_dead()

    def without_dead(self) -> "Graph":
        """A copy without nodes and weights that no output and no effect needs."""
        from planc.compiler.ir.ops import OPS  # the op table knows which ops have effects

        live = set(self.outputs)
        kept: list[Node] = []
        for n in reversed(self.nodes):
            if OPS[n.op].effect or any(v.name in live for v in n.outputs):
                kept.append(n)
                live.update(n.inputs)
        weights = tuple(w for w in self.weights if w.name in live)
        return replace(self, nodes=tuple(reversed(kept)), weights=weights)

    def retyped(self) -> "Graph":
        """A copy whose node outputs have the types that inference gives now, for when a rewrite changed a layout.

        A view that its input's new layout does not allow reads a dense copy.
        """
        types = {v.name: v.type for v in self.inputs} | {w.name: w.value.type for w in self.weights}
        nodes: list[Node] = []
        for n in self.nodes:
            made = _typed(n, types)
            types |= {v.name: v.type for m in made for v in m.outputs}
            nodes += made
        return replace(self, nodes=tuple(nodes))

    def map_nodes(self, fn: Callable[[Node], Node]) -> "Graph":
        """A copy with every node passed through `fn`."""
        return replace(self, nodes=tuple(fn(n) for n in self.nodes))


def _typed(n: Node, types: Mapping[str, TensorType]) -> list[Node]:
    """The node with its outputs' types inferred, after a copy of its input where that must be dense."""
    from planc.compiler.ir.ops import OPS

    op, attrs = OPS[n.op], dict(n.attrs)
    try:
        made = op.infer(attrs, [types[i] for i in n.inputs])
        return [replace(n, outputs=tuple(replace(v, type=t) for v, t in zip(n.outputs, made, strict=True)))]
    except ValueError:
        source = types[n.inputs[0]] if n.inputs else None
        if not op.view or source is None or not source.layout.startswith("strides:"):
            raise
    dense = Value(f"{n.inputs[0]}.dense.{n.out.name}", TensorType(source.dtype, source.shape))
    copied = replace(n, inputs=(dense.name, *n.inputs[1:]))
    return [Node("copy", n.inputs[:1], (dense,), (), n.loc), *_typed(copied, {**types, dense.name: dense.type})]
