"""In-place ops of a trace become plain ones: in goes an exported program, out comes whether its graph is functional.

torch's own way (`run_decompositions`) traces the program a second time, which costs more than the export. Most models
write in place in two ways only: into a tensor that they have just made, and into slices of one.
"""

import operator
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

_A = torch.ops.aten
_SLICES = {_A.slice.Tensor: _A.slice_scatter.default, _A.select.int: _A.select_scatter.default}
_MAY_ALIAS = frozenset(
    {"reshape", "contiguous", "to", "flatten", "type_as", "expand_as", "view_as", "chunk", "split", "reshape_as"}
)


def functionalize(program: ExportedProgram) -> bool:
    """Rewrites the program's graph in place; False where an op writes to what cannot be followed, the graph then being
    as functional as it came."""
    graph = program.graph
    writes = [n for n in graph.nodes if _writes(n)]
    return all(_rewrite(n, graph) for n in writes)


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _rewrite(node: fx.Node, graph: fx.Graph) -> bool:
    plain = _plain(node.target)
    target = node.args[0]
    if plain is None or not isinstance(target, fx.Node):
        return False
    chain = _chain(target)
    root = chain[-1]
    if root.op == "placeholder" or any(n.target not in _SLICES for n in chain[:-1]):
        return False
    order = {n: i for i, n in enumerate(graph.nodes)}
    if any(_read_later(view, order[node], order) for view in _views(root) if view is not target or len(chain) > 1):
        return False
    with graph.inserting_before(node):
        value = _like(graph.call_function(plain, node.args, dict(node.kwargs)), node)
        whole = value
        for view, parent in pairwise(chain):
            whole = _like(graph.call_function(_SLICES[view.target], (parent, whole, *view.args[1:])), node, parent)
    _replace_later(root, whole, order[node], order)
    node.replace_all_uses_with(value)
    graph.erase_node(node)
    return True


def _plain(target: Any) -> Any:
    """The op that returns what an in-place op writes, None when there is none under the same name."""
    name, overload = target._schema.name.removeprefix("aten::"), target._overloadname
    packet = getattr(_A, name.removesuffix("_"), None) if name.endswith("_") else None
    return getattr(packet, overload, None) if packet is not None else None


def _chain(node: fx.Node) -> list[fx.Node]:
    """The node, what it is a view of, and so on to the tensor that owns the memory."""
    chain = [node]
    while (parent := _parent(chain[-1])) is not None:
        chain.append(parent)
    return chain


def _parent(node: fx.Node) -> fx.Node | None:
    if node.target is operator.getitem or (node.op == "call_function" and _is_view(node.target)):
        first = node.args[0]
        return first if isinstance(first, fx.Node) else None
    return None


def _is_view(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return False
    name = target._schema.name.removeprefix("aten::")
    returned = [r.alias_info for r in target._schema.returns]
    return name in _MAY_ALIAS or any(alias is not None and not alias.is_write for alias in returned)


def _views(root: fx.Node) -> list[fx.Node]:
    """Every view of the tensor, views of views included, without the tensor itself."""
    found: list[fx.Node] = []
    todo = [root]
    while todo:
        for user in todo.pop().users:
            if _parent(user) is not None and user.args[0] in (root, *found):
                found.append(user)
                todo.append(user)
    return found


def _read_later(view: fx.Node, at: int, order: dict[fx.Node, int]) -> bool:
    """Whether a view made before place `at` is read after it."""
    return order[view] < at and any(order[u] > at for u in view.users)


def _replace_later(old: fx.Node, new: fx.Node, at: int, order: dict[fx.Node, int]) -> None:
    for user in list(old.users):
        if order.get(user, -1) > at:
            user.replace_input_with(old, new)


def _like(made: fx.Node, node: fx.Node, value: fx.Node | None = None) -> fx.Node:
    made.meta = {**node.meta, "val": (value or node).meta["val"]}
    return made
