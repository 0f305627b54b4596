"""The leaves of a trace: in go its placeholders, out come graph inputs, constants and weights with their recipes."""

from collections.abc import Mapping

from torch import fx

from planc.compiler.ir.graph import Graph
from planc.compiler.ir.recipe import Recipe, cast, infer
from planc.compiler.lift.builder import Builder
from planc.compiler.lift.call import DTYPES, array_of, short_name
from planc.compiler.lift.form import Complex, Form
from planc.compiler.refusal import refused
from planc.compiler.traced import Buffer, Traced
from planc.errors import PlancError

_BELONG = "Check that config.json and the weights belong together."


def leaf(node: fx.Node, traced: Traced, builder: Builder, recipes: Mapping[str, Recipe]) -> Form | Complex:
    """The form of a placeholder. PlancError when a parameter has no recipe, or one that makes another shape."""
    if node.name in traced.inputs:
        name = traced.inputs[node.name]
        dims = ("R",) if name == "logit_rows" else (1, "T")
        return Form.of(name, builder.types[name], dims, (0,) if len(dims) == 1 else (None, 0))
    if node.name in traced.buffers:
        return _buffer(traced.buffers[node.name], builder)
    return _parameter(traced.parameters[node.name], tuple(node.meta["val"].shape), builder, recipes)


def _parameter(fqns: tuple[str, ...], shape: tuple[int, ...], builder: Builder, recipes: Mapping[str, Recipe]) -> Form:
    recipe = _recipe(fqns, recipes)
    made = infer(recipe).shape
    if made != shape:
        names = ", ".join(recipe.loads[:3])
        raise PlancError(f"the checkpoint ({names}) makes {fqns[0]} {made}, the config asks for {shape}. {_BELONG}")
    value = builder.weight(_short(fqns[0]), cast(recipe, "f32"))
    return Form.plain(value.name, value.type)


def _recipe(fqns: tuple[str, ...], recipes: Mapping[str, Recipe]) -> Recipe:
    """The recipe of a parameter with these names (more than one when tied). PlancError when it has none."""
    for fqn in fqns:
        if fqn in recipes:
            return recipes[fqn]
    raise PlancError(f"the checkpoint has no tensor for parameter {' = '.join(fqns)}. {_BELONG}")


def _buffer(buffer: Buffer, builder: Builder) -> Form | Complex:
    if buffer.value.is_complex():
        real, imag = (Buffer(buffer.name, getattr(buffer.value, part).contiguous()) for part in ("real", "imag"))
        return Complex(_buffer(real, builder), _buffer(imag, builder))  # type: ignore[arg-type]
    dtype = buffer.value.dtype
    if dtype not in DTYPES:
        raise refused(f"buffer {buffer.name} has dtype {dtype}, which has no counterpart in the graph")
    made = builder.constant(_short(buffer.name), array_of(buffer.value))
    return Form.known(made.name, made.type, buffer.value)


def _short(fqn: str) -> str:
    """A parameter's name: that of its module, shortened, and its own."""
    module, _, own = fqn.rpartition(".")
    return f"{short_name(module)}.{own}".lstrip(".")


def conserve(traced: Traced, graph: Graph, recipes: Mapping[str, Recipe]) -> None:
    """PlancError when a parameter that the logits depend on is in no weight of the graph.

    The whole recipe is looked for, not the tensors that it loads: a checkpoint's tensor may hold several parameters.
    """
    kept: set[Recipe] = set()
    for weight in graph.weights:
        kept.update(weight.recipe.steps())
    for node in traced.graph.nodes:
        if node.op == "placeholder" and node.users and node.name in traced.parameters:
            fqns = traced.parameters[node.name]
            if cast(_recipe(fqns, recipes), "f32") not in kept:
                raise refused(f"parameter {fqns[0]} is used by the model and lost in the graph")
