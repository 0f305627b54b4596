"""The lift: in goes a traced model, out comes the graph of one packed step, nothing of the model lost."""

import operator
from collections.abc import Mapping

import torch
from torch import fx

from planc.compiler.ir.graph import Graph
from planc.compiler.ir.recipe import Recipe
from planc.compiler.ir.types import TensorType
from planc.compiler.lift.builder import Builder
from planc.compiler.lift.call import Call, Lift
from planc.compiler.lift.form import Complex, Form, Mask
from planc.compiler.lift.layout import arrange
from planc.compiler.lift.leaves import conserve, leaf
from planc.compiler.lift.table import BY_PARTS, COMPLEX_RULES, MASK_VIEWS, MERGED, RULES, refusal_of
from planc.compiler.refusal import refused
from planc.compiler.traced import Traced

_SHAPED_ALIKE = frozenset({torch.ops.aten.view_as.default, torch.ops.aten.expand_as.default})


def lift(traced: Traced, recipes: Mapping[str, Recipe]) -> Graph:
    """The traced model as a graph of primitive ops over packed tokens, logits f32[R, vocab].

    `recipes` makes every parameter from the checkpoint, under any of a tied parameter's names. The graph's `constants`
    hold the arrays of its `const` recipes. Raises PlancError for an op outside of the closed set, a tensor that no
    packed step can hold, an argument that no rule understands, and a parameter that the checkpoint lacks or that would
    be lost.
    """
    builder = Builder()
    env: dict[fx.Node, Lift] = {}
    output = None
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            if node.users:
                env[node] = leaf(node, traced, builder, recipes)
        elif node.op == "call_function":
            _lift_node(node, env, builder, traced)
        elif node.op == "output":
            output = _logits(node, env, builder, traced)
        else:
            raise refused(f"the trace holds {node.op} {node.target}, expected calls of ops only")
    assert output is not None
    graph = builder.graph(traced.name, output)
    conserve(traced, graph, recipes)
    return graph


def _lift_node(node: fx.Node, env: dict[fx.Node, Lift], builder: Builder, traced: Traced) -> None:
    value = node.meta.get("val")
    if isinstance(value, (torch.SymInt, int)):
        return  # sizes are read where they are used
    if node.target is operator.getitem:
        source, at = node.args
        parts = env[source]  # type: ignore[index]
        assert isinstance(parts, tuple)
        assert isinstance(at, int)
        env[node] = parts[at]
        return
    call = Call(node, env, builder, traced.symbols)
    if isinstance(value, torch.Tensor) and 0 in value.shape:
        env[node] = Form("", TensorType("f32", (0,)), call.dims, (None,) * value.dim())
        return
    first = node.args[0] if node.args else None
    seen = env.get(first) if isinstance(first, fx.Node) else None
    if isinstance(seen, Mask) and node.target in MASK_VIEWS and call.dims == (1, 1, "T", "T"):
        env[node] = seen
        return
    env[node] = _apply(call, node, env, builder, traced)


def _apply(call: Call, node: fx.Node, env: dict[fx.Node, Lift], builder: Builder, traced: Traced) -> Lift:
    """What the rule of the node's op makes; a rule that knows real tensors alone runs on both parts of complex ones."""
    pairs = {n: z for n in node.all_input_nodes if isinstance(z := env.get(n), Complex)}
    if pairs and node.target not in COMPLEX_RULES:
        return _by_parts(call, node, pairs, env, builder, traced)
    rule = (COMPLEX_RULES if pairs else RULES).get(node.target)
    if rule is None:
        known = call.evaluated()
        if known is not None:
            return known
        raise call.fail(refusal_of(node.target) or "this op is not in the closed set that can be lifted (docs/ops.md)")
    if call.merges and node.target not in MERGED:
        raise call.fail("works on tokens merged with another axis, which no packed step can hold")
    made = rule(call)
    if call.unread is not None:
        raise call.fail(f"argument {call.unread} would be lost: the rule of this op does not read it")
    return made


def _by_parts(
    call: Call,
    node: fx.Node,
    pairs: Mapping[fx.Node, Complex],
    env: dict[fx.Node, Lift],
    builder: Builder,
    traced: Traced,
) -> Lift:
    """An op that does the same to real and imaginary parts. PlancError for any other, and where real ones mix in."""
    if node.target not in BY_PARTS:
        raise call.fail("this op is not known for complex tensors")
    others = (n.meta["val"] for n in node.all_input_nodes if n not in pairs)
    real = any(isinstance(v, torch.Tensor) and v.dtype.is_floating_point for v in others)
    if real and node.target not in _SHAPED_ALIKE:
        raise call.fail("works on complex and real tensors at once")
    parts = []
    for name in ("real", "imag"):
        own = env | {n: getattr(z, name) for n, z in pairs.items()}
        parts.append(_apply(Call(node, own, builder, traced.symbols), node, own, builder, traced))
    if isinstance(parts[0], tuple):
        return tuple(Complex(a, b) for a, b in zip(*parts, strict=True))  # type: ignore[arg-type]
    return Complex(*parts)  # type: ignore[arg-type]


def _logits(node: fx.Node, env: Mapping[fx.Node, Lift], builder: Builder, traced: Traced) -> str:
    (result,) = node.args[0]  # type: ignore[misc]
    form = env[result]
    call = Call(result, env, builder, traced.symbols)
    if not isinstance(form, Form) or form.dims[:2] != (1, "R") or len(form.dims) != 3 or form.type.dtype != "f32":
        raise call.fail("the model's output is not float32 logits of the wanted rows")
    return arrange(call, form, (1, 2))
