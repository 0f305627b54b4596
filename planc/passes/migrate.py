"""norm(x) * g, w -> norm(x) * (g / s), w * s: scales that calibration chose move from activations to weights.

The graph computes what it computed; only what there is to round differs. The scales are folded into recipes, so that
nothing is left of them when the plan runs. Products also gain the offsets that rounding will make right.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from planc.compiler.ir.graph import Graph, Node, Value, Weight
from planc.compiler.ir.recipe import Recipe, cast, constant, infer, step
from planc.passes.options import Options
from planc.passes.sites import PRODUCTS, Site, sites, weight_of


def migrate(graph: Graph, options: Options) -> tuple[Graph, int]:
    """Applies the chosen scales and offsets; counts the sites. One whose vector ranks share out keeps none: scales
    belong to the whole.
    """
    choices = options.choices
    if not choices.scales and not choices.offsets:
        return graph, 0
    chosen = [s for s in sites(graph) if len(choices.scales.get(s.name, ())) == s.size]
    edit = _Edit(graph)
    for site in chosen:
        edit.take(site, choices.scales[site.name])
    for n in graph.nodes:
        counted = n.op in PRODUCTS and (weight_of(n) in choices.clips or weight_of(n) in choices.shifts)
        if counted and n.out.name in choices.offsets:
            edit.offset(n, choices.offsets[n.out.name])
    return edit.made(), len(chosen)


def rows_factor(site: Site, scales: np.ndarray, rows: int) -> np.ndarray:
    """What each of the rows of a product takes when it is the maker of a site: f32[rows]."""
    factor = np.ones(rows, np.float32)
    factor[site.rows] = 1 / scales
    return factor


class _Edit:
    """Factors for each weight, gathered over all sites and then applied at once."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._recipes: dict[str, Recipe] = {}
        self._constants: dict[str, np.ndarray] = {}
        self._nodes: dict[Node, Node] = {}
        self._new: dict[str, Weight] = {}

    def take(self, site: Site, scales: np.ndarray) -> None:
        for reader in site.readers:
            self._scale(weight_of(reader.node), scales[reader.units])
        if site.rows is None:
            self._norm(site.maker, 1 / scales)
            return
        name = weight_of(site.maker)
        factor = rows_factor(site, scales, int(self._graph.types[name].shape[-2]))
        self._scale(name, factor[:, None])
        if site.maker.attr("bias", False):
            self._node(site.maker, {len(site.maker.inputs) - 1: factor})

    def offset(self, n: Node, offset: np.ndarray) -> None:
        """Adds to the bias of a product, after all scales are taken; one without a bias gets one."""
        now, recipe = self._nodes.get(n, n), self._constant(offset)
        inputs = now.inputs
        if n.attr("bias", False):
            recipe = step("add", cast(self._recipe(inputs[-1]), "f32"), recipe)
            inputs = inputs[:-1]
        weight = Weight(Value(f"{n.out.name}.offset", infer(recipe)), recipe)
        self._new[weight.name] = weight
        self._nodes[n] = replace(now, inputs=(*inputs, weight.name)).with_attrs(bias=True)

    def made(self) -> Graph:
        changed = [replace(w, recipe=self._recipes[w.name]) for w in self._graph.weights if w.name in self._recipes]
        added = (*changed, *self._new.values())
        return self._graph.rewrite(dict(self._nodes), add_weights=added, add_constants=self._constants)

    def _norm(self, n: Node, factor: np.ndarray) -> None:
        """The norm's weight and bias; a norm without weight gets one."""
        first = 2 if n.op.startswith("add_") else 1
        biased = bool(n.attr("bias", False))
        if len(n.inputs) == first + biased:
            recipe = self._constant(factor)
            weight = Weight(Value(f"{n.out.name}.scale", infer(recipe)), recipe)
            self._new[weight.name] = weight
            n_new = replace(n, inputs=(*n.inputs[:first], weight.name, *n.inputs[first:]))
            self._nodes[n] = n_new
            if biased:
                self._node(n, {first + 1: factor})
            return
        self._node(n, dict.fromkeys(range(first, len(n.inputs)), factor))

    def _node(self, n: Node, factors: Mapping[int, np.ndarray]) -> None:
        """Gives inputs of a node their factors, in weights of its own where others read them too."""
        now = self._nodes.get(n, n)
        inputs = list(now.inputs)
        for at, factor in factors.items():
            name = inputs[at]
            if self._graph.users[name] == (n,) or name in self._new:
                self._scale(name, factor)
                continue
            weight = self._graph.weight_by_name[name]
            own = f"{name}.of.{n.out.name}"
            self._new[own] = Weight(Value(own, weight.value.type), self._scaled(weight.recipe, factor))
            inputs[at] = own
        self._nodes[n] = replace(now, inputs=tuple(inputs))

    def _scale(self, name: str, factor: np.ndarray) -> None:
        if name in self._new:
            self._new[name] = replace(self._new[name], recipe=self._scaled(self._new[name].recipe, factor))
            return
        self._recipes[name] = self._scaled(self._recipe(name), factor)

    def _recipe(self, name: str) -> Recipe:
        """The recipe of a weight as it is by now."""
        if name in self._new:
            return self._new[name].recipe
        return self._recipes.get(name) or self._graph.weight_by_name[name].recipe

    def _scaled(self, recipe: Recipe, factor: np.ndarray) -> Recipe:
        return scaled(recipe, factor, self._constants)

    def _constant(self, array: np.ndarray) -> Recipe:
        recipe, entry = constant(np.asarray(array, np.float32))
        self._constants |= entry
        return recipe


def scaled(recipe: Recipe, factor: np.ndarray, constants: dict[str, np.ndarray]) -> Recipe:
    """The recipe times a factor that broadcasts to it, taken below its moves: a stack is still made in parts."""
    shape = _shape(recipe)
    factor = factor.reshape((1,) * (len(shape) - factor.ndim) + factor.shape)
    if recipe.op == "concat":
        return replace(recipe, inputs=tuple(_of_concat(recipe, factor, constants)))
    if recipe.op == "transpose":
        perm: tuple[int, ...] = recipe.get("perm")  # type: ignore[assignment]
        inner = scaled(recipe.inputs[0], factor.transpose(np.argsort(perm)), constants)
        return replace(recipe, inputs=(inner,))
    if recipe.op == "reshape" and (below := _below(factor, shape, _shape(recipe.inputs[0]))) is not None:
        return replace(recipe, inputs=(scaled(recipe.inputs[0], below, constants),))
    made, entry = constant(np.ascontiguousarray(factor.reshape(_trimmed(factor.shape)), np.float32))
    constants |= entry
    return step("mul", cast(recipe, "f32"), made)


def _of_concat(recipe: Recipe, factor: np.ndarray, constants: dict[str, np.ndarray]) -> list[Recipe]:
    axis, at, made = int(recipe.get("axis")), 0, []  # type: ignore[arg-type]
    for part in recipe.inputs:
        size = _shape(part)[axis]
        mine = factor if factor.shape[axis] == 1 else np.take(factor, range(at, at + size), axis)
        made.append(scaled(part, mine, constants))
        at += size
    return made


def _below(factor: np.ndarray, shape: tuple[int, ...], inner: tuple[int, ...]) -> np.ndarray | None:
    """The factor below a reshape that adds or drops axes of 1; None for another."""
    if [d for d in shape if d != 1] != [d for d in inner if d != 1]:
        return None
    kept = iter([f for f, d in zip(factor.shape, shape, strict=True) if d != 1])
    return factor.reshape([1 if d == 1 else next(kept) for d in inner])


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without leading axes of 1, of which one is left where there is nothing else."""
    first = next((i for i, d in enumerate(shape) if d != 1), len(shape) - 1)
    return shape[first:]


def _shape(recipe: Recipe) -> tuple[int, ...]:
    return tuple(int(d) for d in infer(recipe).shape)
