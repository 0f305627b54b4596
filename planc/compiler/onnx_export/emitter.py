"""The writer of ONNX nodes: in go operators and names of values, out come nodes named after the graph's values.

The form of a graph's node returns the names of what it made; the last of its ONNX nodes then takes the name of the
graph's value, the others are named below it: `l0.mlp.mul` is made of `l0.mlp.mul/Sigmoid` and others.
"""

from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from planc.compiler.ir.graph import Graph, Node
from planc.compiler.ir.types import DTYPES, TensorType, dtype_name

ELEMENT = {
    "f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16,
    "f8e4m3": TensorProto.FLOAT8E4M3FN, "i8": TensorProto.INT8, "u4": TensorProto.UINT8,
    "u8": TensorProto.UINT8, "i32": TensorProto.INT32, "i64": TensorProto.INT64, "bool": TensorProto.BOOL,
}  # fmt: skip
DOUBLE = TensorProto.DOUBLE
_SPELT = 8  # constants of at most so many elements have their values as name


@dataclass
class Shared:
    """What the nodes of a model have in common, those of loop bodies included."""

    names: set[str] = field(default_factory=set)
    constants: dict[str, TensorProto] = field(default_factory=dict)


class Emitter:
    """Collects the ONNX nodes of a graph, or of a loop's body when it has a parent.

    `tokens` is the value whose length is the number of tokens. `rename` maps values of the graph to the names that they
    have in ONNX, where these differ.
    """

    def __init__(self, graph: Graph, tokens: str = "ids", rename: dict[str, str] | None = None) -> None:
        self.graph = graph
        self.nodes: list[NodeProto] = []
        self.shared = Shared()
        self.caches: dict[int, tuple[str, str]] = {}  # layer -> keys and values that it attends to
        self._tokens = tokens
        self._rename = rename or {}
        self._made: set[str] = set()  # names that must not change any more
        self._truths: dict[str, str] = {}  # a 0/1 value -> the boolean that it was made from
        self._label, self._doc = "", ""

    def body(self) -> "Emitter":
        """An emitter of a loop's body: it may read what is here, and what it makes stays there."""
        inner = Emitter(self.graph, self._tokens, self._rename)
        inner.shared, inner._label, inner._doc = self.shared, f"{self._label}/expert", self._doc
        return inner

    def type(self, name: str) -> TensorType:
        """The type of a value of the graph."""
        return self.graph.types[name]

    def value(self, name: str) -> str:
        """The ONNX name of a value of the graph."""
        return self._rename.get(name, name)

    def alias(self, name: str, other: str) -> None:
        """Lets the graph's value `name` be the graph's value `other`."""
        self._rename[name] = self.value(other)

    def node(self, n: Node, form: Callable[["Emitter", Node], Sequence[str]]) -> None:
        """The ONNX nodes of a node of the graph."""
        self._label, self._doc = self.value(n.out.name) if n.outputs else n.op, n.loc
        start = len(self.nodes)
        for made, value in zip(form(self, n), n.outputs, strict=True):
            self._call(made, self.value(value.name), start)

    def op(self, kind: str, *inputs: str, **attrs: Any) -> str:
        """One ONNX node with one output; its name."""
        return self.ops(kind, 1, *inputs, **attrs)[0]

    def ops(self, kind: str, outputs: int, *inputs: str, **attrs: Any) -> list[str]:
        """One ONNX node; the names of its outputs."""
        made = [self.name(kind) for _ in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, made, made[0], self._doc or None, **attrs))
        return made

    def once(self, name: str, make: Callable[[], str], *, common: bool = False) -> str:
        """The value of this name, made at the first call and shared by all; a common one belongs to no module."""
        if name not in self._made:
            before = self._label, self._doc
            self._label, self._doc = name, "" if common else self._doc
            start = len(self.nodes)
            self._call(make(), name, start)
            self._label, self._doc = before
        return name

    def const(self, values: object, dtype: str = "f32") -> str:
        """A small constant; equal ones are one."""
        return self._constant(np.asarray(values, DTYPES[dtype]))

    def ints(self, *values: int) -> str:
        """A list of int64, as shapes and axes are written."""
        return self._constant(np.asarray(values, np.int64))

    def cast(self, x: str, dtype: str) -> str:
        """The value in another dtype of the graph."""
        return self.op("Cast", x, to=ELEMENT[dtype])

    def double(self, x: str) -> str:
        """The value in float64."""
        return self.op("Cast", x, to=DOUBLE)

    def wide(self, name: str) -> str:
        """The graph's value `name` in float32."""
        x = self.value(name)
        return x if self.type(name).dtype == "f32" else self.once(f"{x}/f32", lambda: self.cast(x, "f32"))

    def length(self) -> str:
        """int64[1]: the tokens of this call."""
        return self.once("tokens/count", lambda: self.op("Shape", self._tokens), common=True)

    def truth(self, condition: str, dtype: str = "f32") -> str:
        """A boolean as 1 or 0."""
        made = self.cast(condition, dtype)
        self._truths[made] = condition
        return made

    def holds(self, x: str) -> str:
        """A boolean: x is not 0. A NaN is not 0."""
        return self._truths.get(x) or self.op("Not", self.op("Equal", x, self.const(0.0)))

    def _constant(self, array: np.ndarray) -> str:
        spelt = ",".join(map(str, array.flat)) if array.size <= _SPELT else sha256(array.tobytes()).hexdigest()[:16]
        name = f"const/{dtype_name(array.dtype)}{list(array.shape)}/{spelt}"
        if name not in self.shared.constants:
            kind = ELEMENT[dtype_name(array.dtype)]
            self.shared.constants[name] = helper.make_tensor(name, kind, array.shape, array.tobytes(), raw=True)
        return name

    def name(self, what: str) -> str:
        """A free name below the value that is being made."""
        first = free = f"{self._label}/{what}"
        at = 2
        while free in self.shared.names:
            free, at = f"{first}.{at}", at + 1
        self.shared.names.add(free)
        return free

    def _call(self, made: str, name: str, start: int) -> None:
        """Gives the value `made`, of the nodes since `start`, its name in the graph; or copies it where it has one."""
        span = self.nodes[start:]
        maker = next((n for n in span if made in n.output), None)
        self._made.add(name)
        if maker is None or made in self._made:
            self.nodes.append(helper.make_node("Identity", [made], [name], name, self._doc or None))
            return
        if maker.name == made:
            maker.name = name
        for n in span:
            _replace(n.input, made, name)
            _replace(n.output, made, name)
        if made in self._truths:
            self._truths[name] = self._truths.pop(made)


def _replace(names: MutableSequence[str], old: str, new: str) -> None:
    for i, name in enumerate(names):
        if name == old:
            names[i] = new
