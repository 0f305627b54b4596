"""A plan's graph for another checkpoint of its model: in go the graph and the checkpoint, out comes the graph with that
checkpoint's tensors in its recipes, as a build from it would have written them.

What a recipe loads is found in it as the binding makes it, whatever else is done to it: names, layouts and dtypes of
checkpoints differ, the parameters of a model do not.
"""

from dataclasses import replace
from functools import cached_property

from planc.compiler.ir.graph import Graph, Weight
from planc.compiler.ir.quant import SCHEMES
from planc.compiler.ir.recipe import MOVES, Recipe, cast, infer, load
from planc.compiler.source.base import ModelSource, part_of
from planc.compiler.source.bind import Binding
from planc.errors import PlancError
from planc.passes.native import native_part
from planc.passes.quantize import lossless, narrow

_FLOATS = ("f32", "f16", "bf16")


def rebind(graph: Graph, binding: Binding, source: ModelSource) -> Graph:
    """The graph with recipes over the tensors of `source`, which `binding` binds to the model.

    PlancError names the first tensor that cannot take its place: it is missing, has another shape or type, or is
    quantized already in another scheme.
    """
    swap = _Swap(binding, source)
    found = replace(graph, weights=tuple(swap.weight(w, graph) if w.recipe.loads else w for w in graph.weights))
    _check_ties(found, binding, source)
    return found


class _Swap:
    """Recipes of one checkpoint become those of another."""

    def __init__(self, binding: Binding, source: ModelSource) -> None:
        self._binding, self._source = binding, source
        self._known: dict[Recipe, Recipe] = {}

    @cached_property
    def _made(self) -> dict[Recipe, Recipe]:
        """The parameters' recipes by their moves alone: the same of a checkpoint in another dtype."""
        return {_moves(r): r for r in self._binding.recipes.values()}

    def weight(self, w: Weight, graph: Graph) -> Weight:
        schemes = [str(n.attr("scheme")) for n in graph.users[w.name] if "scheme" in dict(n.attrs)]
        if schemes:
            self._check_held(w.recipe, schemes[0])
        recipe = self._stored(w.recipe)
        if infer(recipe) != w.value.type:
            raise self._refused(w.recipe.loads[0], f"makes {infer(recipe)} of {w.name}", f"built for {w.value.type}")
        return replace(w, recipe=recipe)

    def _stored(self, recipe: Recipe) -> Recipe:
        """The recipe of a weight as it is stored, whose passes had the last word on dtypes."""
        if recipe.op == "pack":
            return replace(recipe, inputs=(self._stored(recipe.inputs[0]), *recipe.inputs[1:]))
        dtype = infer(recipe).dtype
        if any(part_of(name)[1] for name in recipe.loads):
            return self._same(recipe)
        if recipe.op == "quantize":
            return self._quantized(recipe)
        if dtype not in _FLOATS:
            return self._same(recipe)
        wide = self._wide(_widened(recipe, dtype))
        return wide if dtype == "f32" else narrow(wide, dtype)

    def _wide(self, recipe: Recipe) -> Recipe:
        """The recipe in float32, as it was lifted."""
        if recipe not in self._known:
            self._known[recipe] = self._looked_up(recipe)
        return self._known[recipe]

    def _looked_up(self, recipe: Recipe) -> Recipe:
        if (found := self._made.get(_moves(recipe))) is not None:
            return cast(found, "f32")
        if recipe.op == "load":
            return cast(self._tensor(recipe), "f32")
        inputs = tuple(self._wide(r) for r in recipe.inputs)
        if recipe.op == "cast":
            return cast(inputs[0], str(recipe.get("dtype")))
        return replace(recipe, inputs=inputs)

    def _tensor(self, leaf: Recipe) -> Recipe:
        """What makes a tensor that the plan loads: a parameter of that name, else the checkpoint's own tensor."""
        name, (dtype, shape) = str(leaf.get("name")), _type(leaf)
        made = self._binding.recipes.get(self._binding.canonical(name))
        if made is not None and _type(made)[1] == shape:
            return made
        info = self._source.tensors.get(name)
        if info is None:
            raise self._refused(name, "has no such tensor", f"built for {dtype} {list(shape)}")
        if info.shape != shape:
            raise self._refused(name, f"has {list(info.shape)}", f"built for {list(shape)}")
        if info.dtype != dtype and not {info.dtype, dtype} <= {*_FLOATS}:
            raise self._refused(name, f"has {info.dtype}", f"built for {dtype}")
        return load(name, info.dtype, shape)

    def _check_held(self, recipe: Recipe, scheme: str) -> None:
        """Codes of one scheme are none of another, of whatever type they are."""
        for name, part in map(part_of, recipe.loads):
            held = self._source.native.get(name)
            if part and held != scheme:
                has = f"holds it as {held}" if held else "does not hold it quantized"
                raise self._refused(name, has, f"built for its codes in {scheme}")

    def _same(self, recipe: Recipe) -> Recipe:
        """Codes and integers: the checkpoint must hold the very tensors, and mean the same by them."""
        for leaf in recipe.leaves():
            if leaf.op != "load":
                continue
            name, (dtype, shape) = str(leaf.get("name")), _type(leaf)
            info = self._source.tensors.get(name)
            if info is None or (info.dtype, info.shape) != (dtype, shape):
                has = "has no such tensor" if info is None else f"has {info.dtype} {list(info.shape)}"
                raise self._refused(name, has, f"built for {dtype} {list(shape)}")
        return recipe

    def _quantized(self, recipe: Recipe) -> Recipe:
        """The codes that the checkpoint holds in the scheme, or what rounding its floats makes.

        A plan that turns weights before it rounds them has no use for codes that did not turn.
        """
        floats, *chosen = recipe.inputs
        wide, row = self._wide(floats), SCHEMES[str(recipe.get("scheme"))]
        as_held = {name for name, _ in recipe.attrs} == {"scheme", "part"} and not chosen
        native = {p: native_part(wide, p, row, self._source.native) for p in row.parts} if as_held else {}
        if native and None not in native.values() and row.scales == "f32":
            return native[str(recipe.get("part"))]  # type: ignore[return-value]
        held = next((name for name in wide.loads if name in self._source.native), None)
        if held and not self._source.requantizes:
            if self._source.native[held] == row.name:
                raise self._refused(held, f"holds it as {row.name}, with scales in f32", f"built for {row.scales}")
            raise PlancError(
                f"{self._source.path} is quantized already: it holds {held} as {self._source.native[held]}, and the "
                f"plan stores {row.name} of it, which would round it twice. Pack the unquantized model, or build a "
                "plan of this one with --dtype auto."
            )
        return replace(recipe, inputs=(lossless(wide), *chosen))

    def _refused(self, name: str, has: str, wanted: str) -> PlancError:
        return PlancError(
            f"{name}: {self._source.path} {has}, the plan was {wanted}. Pack the model that it was built for, or one "
            "trained from that, or build a plan of this one."
        )


def _check_ties(graph: Graph, binding: Binding, source: ModelSource) -> None:
    """Of a tied parameter that the checkpoint holds with other values, a graph that ties it would lose one."""
    loads = {name for w in graph.weights for name in w.recipe.loads}
    for name in binding.untied:
        if loads.isdisjoint(binding.recipes[name].loads):
            raise PlancError(
                f"{name}: {source.path} has a tensor of its own for it, the plan was built for one that it shares. "
                "Build a plan of this model."
            )


def _widened(recipe: Recipe, dtype: str) -> Recipe:
    """Without the casts to `dtype` below its moves, which narrowed what is stored."""
    if recipe.op in MOVES:
        return replace(recipe, inputs=tuple(_widened(r, dtype) for r in recipe.inputs))
    return recipe.inputs[0] if recipe.op == "cast" and recipe.get("dtype") == dtype else recipe


def _moves(recipe: Recipe) -> Recipe:
    """The recipe without casts and dtypes: which elements of which tensors go where."""
    if recipe.op == "cast":
        return _moves(recipe.inputs[0])
    if recipe.op == "load":
        return Recipe("load", attrs=tuple((k, v) for k, v in recipe.attrs if k != "dtype"))
    return replace(recipe, inputs=tuple(_moves(r) for r in recipe.inputs)) if recipe.inputs else recipe


def _type(recipe: Recipe) -> tuple[str, tuple[int, ...]]:
    t = infer(recipe)
    return t.dtype, tuple(int(d) for d in t.shape)
