"""Values get addresses in one arena: views share their input's memory, dead buffers give theirs away.

First fit over lifetimes at the largest step. An op marked `inplace` writes over its input when that dies with it.
"""

from dataclasses import dataclass, replace

import numpy as np

from planc.compiler.ir.graph import Graph, Node, Value
from planc.compiler.ir.ops import OPS
from planc.passes.options import Options

_ALIGN = 64


@dataclass(frozen=True)
class _Buffer:
    """Bytes that live from node `first` to node `last`, both included."""

    name: str
    nbytes: int
    first: int
    last: int


def memory(graph: Graph, options: Options) -> tuple[Graph, int]:
    """Sets the address of every node output; counts the buffers placed."""
    roots = _roots(graph)
    buffers = _lifetimes(graph, roots, options)
    placed = _place(buffers)
    table = {name: placed[root] + offset for name, (root, offset) in roots.items()}

    def addressed(n: Node) -> Node:
        return replace(n, outputs=tuple(Value(v.name, v.type, table[v.name]) for v in n.outputs))

    return graph.map_nodes(addressed), len(buffers)


def arena_bytes(graph: Graph, dims: dict[str, int]) -> int:
    """Size of the arena of a planned graph, in bytes."""
    ends = [v.addr + v.type.extent(dims) for n in graph.nodes for v in n.outputs if v.addr is not None]
    return _aligned(max(ends, default=0))


def _aligned(n: int) -> int:
    return -(-n // _ALIGN) * _ALIGN


def _roots(graph: Graph) -> dict[str, tuple[str, int]]:
    """Each value's buffer and its byte offset in it; a buffer bears the name of the value that first filled it."""
    roots: dict[str, tuple[str, int]] = {}
    sharing: dict[str, list[str]] = {}  # buffer -> the values in it
    index = {n: i for i, n in enumerate(graph.nodes)}
    for n in graph.nodes:
        op = OPS[n.op]
        for v in n.outputs:
            roots[v.name] = (v.name, 0)
        if op.view:
            root, offset = roots[n.inputs[0]]
            roots[n.out.name] = (root, offset + _view_offset(n, graph))
        elif op.inplace is not None and _may_overwrite(n, n.inputs[op.inplace], graph, roots, sharing, index):
            roots[n.out.name] = roots[n.inputs[op.inplace]]
        for v in n.outputs:
            sharing.setdefault(roots[v.name][0], []).append(v.name)
    return roots


def _view_offset(n: Node, graph: Graph) -> int:
    if n.op != "slice":
        return 0
    x = graph.types[n.inputs[0]]
    return int(n.attr("start")) * x.strides()[int(n.attr("axis"))] * x.itemsize  # type: ignore[arg-type]


def _may_overwrite(
    n: Node,
    name: str,
    graph: Graph,
    roots: dict[str, tuple[str, int]],
    sharing: dict[str, list[str]],
    index: dict[Node, int],
) -> bool:
    """True when `n` is the last reader of the input's whole buffer and the output has its type."""
    if name not in roots or graph.types[name] != n.out.type or n.inputs.count(name) > 1:
        return False
    root = roots[name][0]
    values = sharing[root]
    if any(v in graph.outputs for v in values) or graph.types[root] != n.out.type:
        return False
    return all(index[u] <= index[n] for v in values for u in graph.users[v]) and not any(
        v in n.inputs for v in values if v != name
    )


def _lifetimes(graph: Graph, roots: dict[str, tuple[str, int]], options: Options) -> list[_Buffer]:
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, n in enumerate(graph.nodes):
        for v in n.outputs:
            root = roots[v.name][0]
            first.setdefault(root, i)
            last[root] = max(last.get(root, i), i)
        for name in n.inputs:
            if name in roots:
                last[roots[name][0]] = i
    for o in graph.outputs:
        last[roots[o][0]] = len(graph.nodes)
    types = graph.types
    return [_Buffer(r, _aligned(types[r].nbytes(options.dims)), first[r], last[r]) for r in first]


def _place(buffers: list[_Buffer]) -> dict[str, int]:
    """Addresses: the largest first, each at the lowest gap among the buffers that live at the same time."""
    ranked = sorted(buffers, key=lambda b: (-b.nbytes, b.first, b.name))
    first, last, sizes = np.array([(b.first, b.last, b.nbytes) for b in ranked], np.int64).reshape(-1, 3).T
    starts = np.zeros_like(sizes)
    for i, b in enumerate(ranked):
        (beside,) = np.nonzero((first[:i] <= b.last) & (last[:i] >= b.first))
        at = 0
        for k in beside[np.argsort(starts[beside], kind="stable")]:
            if at + b.nbytes <= starts[k]:
                break
            at = max(at, int(starts[k] + sizes[k]))
        starts[i] = at
    return {b.name: int(at) for b, at in zip(ranked, starts, strict=True)}
