"""The lift: in goes a traced model, out comes the graph of one packed step, nothing of the model lost."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import fx

from planc.compiler.ir.graph import Graph
from planc.compiler.ir.recipe import load, step
from planc.compiler.ir.types import DTYPES as NUMPY
from planc.compiler.ir.types import TensorType
from planc.compiler.lift.builder import Builder
from planc.compiler.lift.call import DTYPES, Call, Lift, short_name
from planc.compiler.lift.form import Form, Mask
from planc.compiler.lift.layout import arrange
from planc.compiler.lift.table import MASK_VIEWS, RULES, closed_set
from planc.compiler.trace import Buffer, Traced
from planc.errors import PlancError

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Lifted:
    """The graph, and the arrays of its `const` recipes by digest."""

    graph: Graph
    constants: Mapping[str, np.ndarray]


def lift(traced: Traced, tensors: Tensors, names: Mapping[str, str]) -> Lifted:
    """The traced model as a graph of primitive ops over packed tokens, logits f32[R, vocab].

    `tensors` gives (dtype, shape) of every checkpoint tensor, `names` the checkpoint name of every parameter. Raises
    PlancError for an op outside of the closed set, a tensor that no packed step can hold, an argument that no rule
    understands, and a parameter that the checkpoint lacks or that would be lost.
    """
    builder = Builder()
    env: dict[fx.Node, Lift] = {}
    output = None
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            if node.users:
                env[node] = _placeholder(node, traced, builder, tensors, names)
        elif node.op == "call_function":
            _lift_node(node, env, builder, traced)
        elif node.op == "output":
            output = _logits(node, env, builder, traced)
        else:
            raise PlancError(f"the trace holds {node.op} {node.target}, expected calls of ops only")
    assert output is not None
    graph = builder.graph(traced.name, output)
    _conserve(traced, graph, tensors, names)
    return Lifted(graph, graph.constants)


def _placeholder(node: fx.Node, traced: Traced, builder: Builder, tensors: Tensors, names: Mapping[str, str]) -> Form:
    if node.name in traced.inputs:
        name = traced.inputs[node.name]
        dims = ("R",) if name == "logit_rows" else (1, "T")
        return Form.of(name, builder.types[name], dims, (0,) if len(dims) == 1 else (None, 0))
    if node.name in traced.buffers:
        return _buffer(traced.buffers[node.name], builder)
    fqns = traced.parameters[node.name]
    shape = tuple(node.meta["val"].shape)
    name = checkpoint_name(fqns, tensors, names)
    dtype, stored = tensors[name]
    if stored != shape:
        raise PlancError(f"tensor {name} of the checkpoint has shape {stored}, the config asks for {shape}")
    recipe = load(name, dtype, shape)
    if dtype != "f32":
        recipe = step("cast", recipe, dtype="f32")
    value = builder.weight(short_name(fqns[0]), recipe)
    return Form.plain(value.name, value.type)


def checkpoint_name(fqns: tuple[str, ...], tensors: Tensors, names: Mapping[str, str]) -> str:
    """The checkpoint's name of a parameter with these names (more than one when tied). PlancError when it has none."""
    for fqn in fqns:
        if names.get(fqn) in tensors:
            return names[fqn]
    wanted = names.get(fqns[0], fqns[0])
    raise PlancError(f"the checkpoint has no tensor {wanted} (parameter {' = '.join(fqns)})")


def _buffer(buffer: Buffer, builder: Builder) -> Form:
    dtype = buffer.value.dtype
    if dtype not in DTYPES:
        raise PlancError(f"buffer {buffer.name} has dtype {dtype}, which has no counterpart in the graph")
    made = builder.constant(short_name(buffer.name), buffer.value.detach().numpy().astype(NUMPY[DTYPES[dtype]]))
    return Form.known(made.name, made.type, buffer.value)


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
    rule = RULES.get(node.target)
    if rule is None:
        raise call.fail(f"this op is not in the closed set that can be lifted: {closed_set()}")
    env[node] = rule(call)
    if call.unread is not None:
        raise call.fail(f"argument {call.unread} would be lost: the rule of this op does not read it")


def _logits(node: fx.Node, env: Mapping[fx.Node, Lift], builder: Builder, traced: Traced) -> str:
    (result,) = node.args[0]  # type: ignore[misc]
    form = env[result]
    call = Call(result, env, builder, traced.symbols)
    if not isinstance(form, Form) or form.dims[:2] != (1, "R") or len(form.dims) != 3 or form.type.dtype != "f32":
        raise call.fail("the model's output is not float32 logits of the wanted rows")
    return arrange(call, form, (1, 2))


def _conserve(traced: Traced, graph: Graph, tensors: Tensors, names: Mapping[str, str]) -> None:
    """PlancError when a parameter that the logits depend on is in no weight of the graph."""
    loaded = {name for w in graph.weights for name in w.recipe.loads}
    for node in traced.graph.nodes:
        if node.op == "placeholder" and node.users and node.name in traced.parameters:
            fqns = traced.parameters[node.name]
            if checkpoint_name(fqns, tensors, names) not in loaded:
                raise PlancError(f"parameter {fqns[0]} is used by the model and lost in the graph")
