"""Attention that does not go through transformers' interface: its softmax is the anchor, probing tells the rest.

In goes a trace of the model's eager code, out comes one where each softmax over tokens, with the products around it, is
an attention op. What lies between the scores and the softmax is run on random scores: where the result follows a score
the key is seen (the mask), the factor is the scale, and what a score of zero gives are the slopes of a linear bias.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from planc.compiler.refusal import refused
from planc.compiler.traced import Buffer, Traced, module_path, source_line

_A = torch.ops.aten
_PRODUCTS = (_A.matmul.default, _A.bmm.default)
_SOFTMAX = (_A.softmax.int, _A._softmax.default)
_NEUTRAL = frozenset(
    {_A.view.default, _A._unsafe_view.default, _A.reshape.default, _A.expand.default, _A.unsqueeze.default}
    | {_A.contiguous.default, _A._to_copy.default, _A.to.dtype, _A.to.device, _A.type_as.default, _A.clone.default}
    | {_A.transpose.int, _A.permute.default, _A.squeeze.dim, _A.detach.default, _A.alias.default, _A.dropout.default}
)
_FEW, _MANY = 24, 16_000_000  # tokens of the first probe; elements of the scores of the second
_HIDDEN = -5000.0  # below it a score counts as masked: some models add -10000
_LARGE = 300.0  # scores of the second probe: a cap bends those
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Finding:
    """What lies between scores and softmax: score * scale, a mask, slopes [heads] times the distance (or None)."""

    scale: float
    kind: str
    window: int
    slopes: Tensor | None


def anchored(traced: Traced) -> Traced:
    """The trace with every softmax over keys as an attention op. PlancError where there is none, or one is not one."""
    graph = traced.graph
    traced = replace(traced, buffers=dict(traced.buffers))
    _split_sums(graph)
    anchors = [n for n in graph.nodes if n.target in _SOFTMAX and _over_keys(n)]
    if not anchors:
        raise refused("the model has no attention: neither transformers' interface nor a softmax over tokens was found")
    for layer, anchor in enumerate(anchors):
        _replace(anchor, layer, traced, graph)
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    return traced


def _split_sums(graph: fx.Graph) -> None:
    """baddbmm(c, a, b) as beta c + alpha (a @ b), so that the product is a node of its own."""
    for node in list(graph.nodes):
        if node.target is not _A.baddbmm.default:
            continue
        added, a, b = node.args
        beta, alpha = (node.kwargs.get(name, 1) for name in ("beta", "alpha"))
        with graph.inserting_before(node):
            product = _call(graph, node, _A.bmm.default, a, b)
            scaled = _call(graph, node, _A.mul.Scalar, product, alpha)
            total = _call(graph, node, _A.add.Tensor, scaled, _call(graph, node, _A.mul.Scalar, added, beta))
        node.replace_all_uses_with(total)
        graph.erase_node(node)


def _call(graph: fx.Graph, like: fx.Node, target: Any, *args: Any) -> fx.Node:
    """A new node with the value that its op says, at the place in the model's code that `like` came from."""
    node = graph.call_function(target, args)
    given = fx.map_arg(args, lambda n: n.meta["val"])
    with like.meta["val"].fake_mode:
        node.meta = {**like.meta, "val": target(*given)}
    return node


def _over_keys(anchor: fx.Node) -> bool:
    shape = anchor.meta["val"].shape
    last = anchor.args[1] in (-1, len(shape) - 1)
    return last and len(shape) > 2 and isinstance(shape[-1], torch.SymInt) and isinstance(shape[-2], torch.SymInt)


def _replace(anchor: fx.Node, layer: int, traced: Traced, graph: fx.Graph) -> None:
    """One attention op in place of everything from the scores to the weighted values."""
    scores, weighted = _product_before(anchor, traced), _product_after(anchor)
    found = _probe(anchor, scores, traced)
    q, k, v = scores.args[0], scores.args[1], weighted.args[1]
    (ids,) = [n for n in graph.nodes if traced.inputs.get(n.name) == "ids"]
    slopes = _slopes(found, layer, traced, graph)
    with graph.inserting_before(weighted):
        tokens = _call(graph, weighted, _A.sym_size.int, ids, 1)
        heads = [_heads(graph, weighted, x) for x in (q, _call(graph, weighted, _A.transpose.int, k, -1, -2), v)]
        device = ids.meta["val"].device
        mask = _call(graph, weighted, torch.ops.planc.mask.default, tokens, tokens, found.kind, found.window, device)
        rest = (mask, None, None, slopes, found.scale, True, 0, 0.0, layer)
        made = _call(graph, weighted, torch.ops.planc.attention.default, *heads, *rest)
        moved = _call(graph, weighted, _A.transpose.int, made, 1, 2)
        shape = [tokens if isinstance(d, torch.SymInt) else d for d in weighted.meta["val"].shape]
        out = _call(graph, weighted, _A.reshape.default, moved, shape)
    weighted.replace_all_uses_with(out)


def _heads(graph: fx.Graph, like: fx.Node, x: Any) -> fx.Node:
    """[heads, T, D] as [1, heads, T, D]."""
    node: fx.Node = x
    return node if node.meta["val"].dim() == 4 else _call(graph, like, _A.unsqueeze.default, node, 0)


def _slopes(found: Finding, layer: int, traced: Traced, graph: fx.Graph) -> fx.Node | None:
    """A placeholder for the slopes, which are a buffer of the trace from now on."""
    if found.slopes is None:
        return None
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        node = graph.placeholder(f"slopes_{layer}")
    node.meta = {"val": torch.empty(found.slopes.shape, device="meta")}
    traced.buffers[node.name] = Buffer(f"layers.{layer}.slopes", found.slopes)  # type: ignore[index]
    return node


def _product_before(anchor: fx.Node, traced: Traced) -> fx.Node:
    """The one product of activations that the softmax is computed from."""
    todo, seen, found = [anchor.args[0]], set(), []
    while todo:
        node = todo.pop()
        if not isinstance(node, fx.Node) or node in seen:
            continue
        seen.add(node)
        if node.target in _PRODUCTS and _grows_with_keys(node):
            found.append(node)
        else:
            todo += node.all_input_nodes
    if len(found) != 1:
        raise _fail(anchor, f"the scores come from {len(found)} products, expected one of queries and keys")
    return found[0]


def _grows_with_keys(node: fx.Node) -> bool:
    return isinstance(node.meta["val"].shape[-1], torch.SymInt)


def _product_after(anchor: fx.Node) -> fx.Node:
    node = anchor
    while True:
        users = list(node.users)
        if len(users) != 1:
            raise _fail(anchor, f"the weights are read by {len(users)} ops, expected the product with the values alone")
        (user,) = users
        if user.target in _PRODUCTS and user.args[0] is node:
            return user
        if user.target not in _NEUTRAL:
            raise _fail(anchor, f"{user.target} between the softmax and the product with the values is not understood")
        node = user


def _probe(anchor: fx.Node, scores: fx.Node, traced: Traced) -> Finding:
    """Scale, mask and slopes, by the answer to random scores; the mask again on many tokens, beyond small windows."""
    generator = torch.Generator().manual_seed(0)

    def answer(tokens: int, given: Tensor, token: int = 0) -> Tensor:
        made = _Evaluator(anchor, traced, tokens, {scores: given}, token).value(anchor.args[0])
        return made.reshape(-1, tokens, tokens).double()

    def visible(tokens: int) -> tuple[Tensor, Tensor]:
        shape = [tokens if isinstance(d, torch.SymInt) else d for d in scores.meta["val"].shape]
        zero, one = answer(tokens, torch.zeros(shape)), answer(tokens, torch.ones(shape))
        if tokens == _FEW and not torch.equal(zero, answer(tokens, torch.zeros(shape), token=1)):
            raise _fail(anchor, "which keys a query sees depends on the tokens themselves")
        return ((one - zero).abs() > 0) & (zero > _HIDDEN), zero[:, -1].clone()

    few, _ = visible(_FEW)
    if not bool((few == few[:1]).all()):
        raise _fail(anchor, "the heads of one layer see different keys")
    scale, bias = _affine(anchor, answer, scores, few, generator)
    heads = few.shape[0]
    many = max(_FEW, min(traced.limit, int((_MANY / heads) ** 0.5)))
    seen, last = visible(many)
    kind, window = _mask_kind(anchor, seen[0])
    return Finding(scale, kind, window, _linear_bias(anchor, bias, few, last, seen[0, -1]))


def _affine(
    anchor: fx.Node, answer: Any, scores: fx.Node, seen: Tensor, generator: torch.Generator
) -> tuple[float, Tensor]:
    """(scale, what a score of zero gives [heads, T, T]); PlancError unless the answer is scale * score + that."""
    shape = [_FEW if isinstance(d, torch.SymInt) else d for d in scores.meta["val"].shape]
    zero = answer(_FEW, torch.zeros(shape))
    one, two = torch.randn(shape, generator=generator), _LARGE * torch.randn(shape, generator=generator)
    flat = [x.reshape(seen.shape).double() for x in (one, two)]
    scale = float(((answer(_FEW, one) - zero) / flat[0])[seen].median())
    expected = scale * flat[1] + zero
    if not torch.allclose(answer(_FEW, two)[seen], expected[seen], rtol=_TOLERANCE, atol=_TOLERANCE):
        raise _fail(anchor, "between scores and softmax lies more than a scale, a mask and a bias")
    return scale, zero


def _mask_kind(anchor: fx.Node, seen: Tensor) -> tuple[str, int]:
    """("causal", 0) or ("sliding", window) of what each query sees [T, T]."""
    q, k = torch.arange(len(seen))[:, None], torch.arange(len(seen))[None]
    width = int(seen[-1].sum())
    if torch.equal(seen, k <= q):
        return "causal", 0
    if torch.equal(seen, (k <= q) & (k > q - width)):
        return "sliding", width
    raise _fail(anchor, "its mask is neither causal nor a sliding window")


def _linear_bias(anchor: fx.Node, bias: Tensor, seen: Tensor, last: Tensor, last_seen: Tensor) -> Tensor | None:
    """Slopes f32[heads] when the bias is slope * (key - query) up to a constant a row, None when there is none.

    `last` is the bias [heads, keys] of the last of many queries, and `last_seen` the keys that it sees.
    """
    tokens = bias.shape[-1]
    relative = bias - bias.diagonal(dim1=1, dim2=2)[:, :, None]
    distance = (torch.arange(tokens)[None] - torch.arange(tokens)[:, None]).double()
    slopes = relative[:, 1, 0] / distance[1, 0]  # neighbours see each other under any window
    far = slopes[:, None] * torch.arange(1 - last.shape[1], 1)
    near = torch.allclose(relative[seen], (slopes[:, None, None] * distance)[seen], rtol=1e-2, atol=1e-6)
    if not near or not torch.allclose((last - last[:, -1:])[:, last_seen], far[:, last_seen], rtol=1e-2, atol=1e-6):
        raise _fail(anchor, "the bias of its scores is not linear in the distance")
    return slopes.float() if float(slopes.abs().max()) > 1e-9 else None


class _Evaluator:
    """Values of a trace's nodes for one sequence of `tokens` tokens, all alike, with some nodes given."""

    def __init__(
        self, anchor: fx.Node, traced: Traced, tokens: int, given: Mapping[fx.Node, Any], token: int = 0
    ) -> None:
        self._anchor, self._traced = anchor, traced
        self._tokens, self._known, self._token = tokens, dict(given), token

    def value(self, node: Any) -> Any:
        """The value of a node; PlancError where a parameter or a token decides it."""
        todo = [node]
        while todo:
            last = todo[-1]
            missing = [n for n in last.all_input_nodes if n not in self._known]
            if last in self._known:
                todo.pop()
            elif missing:
                todo += missing
            else:
                self._known[last] = self._run(last)
        return self._known[node]

    def _run(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._leaf(node)
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), self._plain)  # type: ignore[misc]
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _plain(self, x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("cpu")
        return self._known[x] if isinstance(x, fx.Node) else x

    def _leaf(self, node: fx.Node) -> Tensor:
        if node.name in self._traced.buffers:
            return self._traced.buffers[node.name].value
        name = self._traced.inputs.get(node.name)
        if name == "ids":  # for its size alone: what depends on tokens passes through the scores
            return torch.full((1, self._tokens), self._token)
        if name == "positions":
            return torch.arange(self._tokens)[None]
        named = self._traced.parameters.get(node.name, (node.name,))[0]
        raise _fail(self._anchor, f"its scores depend on {named} besides queries and keys")


def _fail(anchor: fx.Node, why: str) -> Exception:
    place = f"{module_path(anchor)} ({source_line(anchor)})"
    return refused(f"the attention in {place} cannot be told from its softmax: {why}")
