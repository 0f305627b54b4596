"""The memory planner by its invariants: nothing that lives at the same time overlaps, whatever the graph."""

from dataclasses import replace

import numpy as np
import pytest

from planc.codegen.target import parse
from planc.compiler.ir.graph import Graph, Node, Value
from planc.compiler.ir.infer import slice_
from planc.compiler.ir.ops import OPS
from planc.compiler.ir.types import TensorType
from planc.compiler.ir.verify import verify
from planc.passes.memory import arena_bytes, memory
from planc.passes.options import Options

OPTIONS = Options(parse("cpu:portable"), "f32", "f32", 256, 4, 32, 16)
DIMS = OPTIONS.dims


def random_graph(seed: int) -> Graph:
    """Chains of pointwise ops, views and concats over a few live values."""
    rng = np.random.default_rng(seed)
    x = Value("x", TensorType("f32", ("T", 16)))
    live, nodes = [x], []
    for i in range(40):
        a = live[rng.integers(len(live))]
        kind = rng.choice(["neg", "rms_norm", "add", "concat", "slice", "reshape"])
        node = _node(kind, a, live, f"v{i}", rng)
        if node is None:
            continue
        nodes.append(node)
        live = [*live[-5:], node.out]
    return Graph("g", (x,), (), tuple(nodes), (nodes[-1].out.name, nodes[len(nodes) // 2].out.name))


def _node(kind, a: Value, live: list[Value], name: str, rng) -> Node | None:
    width = int(a.type.shape[-1])
    if kind in ("neg", "rms_norm"):
        attrs = (("eps", 1e-6),) if kind == "rms_norm" else ()
        return Node(kind, (a.name,), (Value(name, TensorType("f32", a.type.shape)),), attrs)
    if kind == "add":
        same = [v for v in live if v.type.shape == a.type.shape]
        b = same[rng.integers(len(same))]
        return Node("add", (a.name, b.name), (Value(name, TensorType("f32", a.type.shape)),))
    if kind == "concat" and len(a.type.shape) == 2 and width <= 64:
        return Node("concat", (a.name, a.name), (Value(name, TensorType("f32", ("T", 2 * width))),), (("axis", 1),))
    if a.name == "x":
        return None  # a graph input has no address; select copies it before a view
    if kind == "slice" and width > 4:
        attrs = {"axis": len(a.type.shape) - 1, "start": 1, "stop": width - 2}
        return Node("slice", (a.name,), (Value(name, slice_(attrs, [a.type])[0]),), tuple(attrs.items()))
    if kind == "reshape" and len(a.type.shape) == 2 and width % 2 == 0:
        attrs = {"shape": (-1, 2, width // 2)}
        out = Value(name, OPS["reshape"].infer(attrs, [a.type])[0])
        return Node("reshape", (a.name,), (out,), tuple(attrs.items()))
    return None


def elements(v: Value) -> set[int]:
    """Byte addresses of the elements of a planned value."""
    shape = [DIMS[d] if isinstance(d, str) else d for d in v.type.shape]
    index = np.indices(shape).reshape(len(shape), -1)
    offsets = np.tensordot(np.array(v.type.strides()), index, axes=1)
    return set((v.addr + offsets * 4).tolist())


@pytest.mark.parametrize("seed", range(25))
def test_running_in_the_arena_gives_what_running_apart_gives(seed: int) -> None:
    """Executes the plan in one byte array: a wrong overlap would change a value before its last reader."""
    graph = random_graph(seed)
    planned, _ = memory(graph, OPTIONS)
    verify(planned, "memory")
    arena = np.zeros(arena_bytes(planned, DIMS) // 4, np.float32)
    x = np.random.default_rng(seed).standard_normal((DIMS["T"], 16)).astype(np.float32)
    apart, values = {"x": x}, {v.name: v for n in planned.nodes for v in n.outputs}
    for n in planned.nodes:
        types = [planned.types[i] for i in n.inputs]
        (apart[n.out.name],) = OPS[n.op].ref(dict(n.attrs), [apart[i] for i in n.inputs], types)
        read = [x if i == "x" else _view(arena, values[i]) for i in n.inputs]
        for i, array in zip(n.inputs, read, strict=True):
            np.testing.assert_array_equal(array, apart[i], err_msg=f"%{i} was overwritten before {n.out.name}")
        if not OPS[n.op].view:
            (made,) = OPS[n.op].ref(dict(n.attrs), [r.copy() for r in read], types)
            _view(arena, n.out)[...] = made
    for o in planned.outputs:
        np.testing.assert_array_equal(_view(arena, values[o]), apart[o])


def _view(arena: np.ndarray, v: Value) -> np.ndarray:
    shape = [DIMS[d] if isinstance(d, str) else d for d in v.type.shape]
    strides = [s * 4 for s in v.type.strides()]
    return np.lib.stride_tricks.as_strided(arena[v.addr // 4 :], shape, strides)


def test_planning_twice_gives_the_same_addresses_and_less_than_the_sum() -> None:
    graph = random_graph(3)
    once, twice = memory(graph, OPTIONS)[0], memory(graph, OPTIONS)[0]
    assert once == twice
    total = sum(v.type.nbytes(DIMS) for n in graph.nodes for v in n.outputs)
    assert arena_bytes(once, DIMS) < total / 2


def test_an_op_writes_over_its_input_only_when_that_dies() -> None:
    x = Value("x", TensorType("f32", ("T", 16)))
    a, b, c = (Value(n, x.type) for n in "abc")
    chain = (Node("neg", ("x",), (a,)), Node("exp", ("a",), (b,)), Node("add", ("a", "b"), (c,)))
    planned, _ = memory(Graph("g", (x,), (), chain, ("c",)), OPTIONS)
    addr = {v.name: v.addr for n in planned.nodes for v in n.outputs}
    assert addr["b"] != addr["a"] == addr["c"]
    assert elements(planned.nodes[0].out) == elements(replace(planned.nodes[2].out))
