"""The leaves of a trace: in go its placeholders, out come graph inputs, constants and weights with their recipes."""

from collections.abc import Mapping

from torch import fx

from planc.compiler.ir.graph import Graph
from planc.compiler.ir.recipe import load, step
from planc.compiler.lift.builder import Builder
from planc.compiler.lift.call import DTYPES, array_of, short_name
from planc.compiler.lift.form import Form
from planc.compiler.refusal import refused
from planc.compiler.trace import Buffer, Traced
from planc.errors import PlancError

_BELONG = "Check that config.json and the weights belong together."
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


def leaf(node: fx.Node, traced: Traced, builder: Builder, tensors: Tensors, names: Mapping[str, str]) -> Form:
    """The form of a placeholder. PlancError when the checkpoint lacks the parameter or has it in another shape."""
    if node.name in traced.inputs:
        name = traced.inputs[node.name]
        dims = ("R",) if name == "logit_rows" else (1, "T")
        return Form.of(name, builder.types[name], dims, (0,) if len(dims) == 1 else (None, 0))
    if node.name in traced.buffers:
        return _buffer(traced.buffers[node.name], builder)
    return _parameter(traced.parameters[node.name], tuple(node.meta["val"].shape), builder, tensors, names)


def _parameter(
    fqns: tuple[str, ...], shape: tuple[int, ...], builder: Builder, tensors: Tensors, names: Mapping[str, str]
) -> Form:
    name = checkpoint_name(fqns, tensors, names)
    dtype, stored = tensors[name]
    if stored != shape:
        raise PlancError(f"tensor {name} of the checkpoint has shape {stored}, the config asks for {shape}. {_BELONG}")
    recipe = load(name, dtype, shape)
    if dtype != "f32":
        recipe = step("cast", recipe, dtype="f32")
    value = builder.weight(_short(fqns[0]), recipe)
    return Form.plain(value.name, value.type)


def checkpoint_name(fqns: tuple[str, ...], tensors: Tensors, names: Mapping[str, str]) -> str:
    """The checkpoint's name of a parameter with these names (more than one when tied). PlancError when it has none."""
    for fqn in fqns:
        if names.get(fqn) in tensors:
            return names[fqn]
    wanted = names.get(fqns[0], fqns[0])
    raise PlancError(f"the checkpoint has no tensor {wanted} (parameter {' = '.join(fqns)}). {_BELONG}")


def _buffer(buffer: Buffer, builder: Builder) -> Form:
    dtype = buffer.value.dtype
    if dtype not in DTYPES:
        raise refused(f"buffer {buffer.name} has dtype {dtype}, which has no counterpart in the graph")
    made = builder.constant(_short(buffer.name), array_of(buffer.value))
    return Form.known(made.name, made.type, buffer.value)


def _short(fqn: str) -> str:
    """A parameter's name: that of its module, shortened, and its own."""
    module, _, own = fqn.rpartition(".")
    return f"{short_name(module)}.{own}".lstrip(".")


def conserve(traced: Traced, graph: Graph, tensors: Tensors, names: Mapping[str, str]) -> None:
    """PlancError when a parameter that the logits depend on is in no weight of the graph."""
    loaded = {name for w in graph.weights for name in w.recipe.loads}
    for node in traced.graph.nodes:
        if node.op == "placeholder" and node.users and node.name in traced.parameters:
            fqns = traced.parameters[node.name]
            if checkpoint_name(fqns, tensors, names) not in loaded:
                raise refused(f"parameter {fqns[0]} is used by the model and lost in the graph")
