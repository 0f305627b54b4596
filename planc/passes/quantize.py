"""linear(x, w) -> qlinear(x, codes, scales), or the same linear over a narrower w: weights take their storage.

Where the scheme rounds activations, `quantize_rows` stands before the product, once for all that read a value. Norms,
biases and tables stay float32.
"""

from dataclasses import replace

import numpy as np

from planc.compiler.ir.graph import Graph, Node, Value, Weight
from planc.compiler.ir.hadamard import block
from planc.compiler.ir.operands import codes_tail
from planc.compiler.ir.ops import OPS
from planc.compiler.ir.quant import SCHEMES, Scheme
from planc.compiler.ir.recipe import MOVES, Recipe, constant, infer, step
from planc.errors import PlancError
from planc.passes.assign import WEIGHT, weighted
from planc.passes.native import native_part
from planc.passes.options import Options

# By what is rounded, to what, in which blocks it turns and shares scales, and what else it takes.
_Rows = dict[tuple[str, str, int, int | None, tuple[Weight, ...]], Node]


def quantize(graph: Graph, options: Options) -> tuple[Graph, int]:
    """Gives every weight of a product or an embedding the storage that `assign` wrote; counts the nodes."""
    replaced: dict[Node, list[Node]] = {}
    weights: dict[str, Weight] = {}
    constants: dict[str, np.ndarray] = {}
    rows: _Rows = {}
    for n in weighted(graph):
        store = str(n.attr("store"))
        weight = graph.weight_by_name[n.inputs[WEIGHT[n.op]]]
        if store not in SCHEMES:
            narrowed = _narrowed(weight, store)
            weights[narrowed.name] = narrowed
            replaced[n] = [_over(n, n.inputs, WEIGHT[n.op], [narrowed])]
            continue
        parts, turned = _parts(weight, SCHEMES[store], graph, options, constants)
        taken = _taken(weight, options, constants) if n.op != "embedding" else ()
        weights |= {w.name: w for w in (*parts, *taken)}
        replaced[n] = _quantized(n, parts, SCHEMES[store], turned, taken, graph, rows)
    return graph.rewrite(dict(replaced), add_weights=weights.values(), add_constants=constants), len(replaced)


def _narrowed(weight: Weight, dtype: str) -> Weight:
    recipe = narrow(weight.recipe, dtype)
    return Weight(Value(f"{weight.name}.{dtype}", infer(recipe)), recipe)


def _parts(
    weight: Weight, row: Scheme, graph: Graph, options: Options, constants: dict[str, np.ndarray]
) -> tuple[list[Weight], int]:
    """The parts as the checkpoint holds them, or made of its floats; and the blocks in which these turn for that."""
    turned = 1
    native = [native_part(weight.recipe, p, row, options.storage.native) for p in row.parts]
    if row.read_only and None in native:
        raise PlancError(f"{weight.name} cannot be stored as {row.name}: only checkpoints that hold it have it.")
    recipes = [r for r in native if r is not None]
    if len(recipes) < len(row.parts):
        given = [lossless(weight.recipe)]
        for chosen in (options.choices.clips, options.choices.outliers):
            if weight.name in chosen:
                recipe, found = constant(chosen[weight.name])
                given.append(recipe)
                constants |= found
        if row.turns and all(n.op != "embedding" for n in graph.users[weight.name]):  # which reads rows as they are
            turned = block(int(infer(given[0]).shape[-1]))
        attrs = {"hadamard": turned} if turned > 1 else {}
        recipes = [step("quantize", *given, scheme=row.name, part=p, **attrs) for p in row.parts]
    made = [Weight(Value(f"{weight.name}.{p}", infer(r)), r) for p, r in zip(row.parts, recipes, strict=True)]
    return made, turned


def _taken(weight: Weight, options: Options, constants: dict[str, np.ndarray]) -> tuple[Weight, ...]:
    """What calibration found that rows lose before they are rounded, and which of their features are kept to two
    digits; the same vector is one weight.
    """
    made = []
    for name, chosen in (("shift", options.choices.shifts), ("outliers", options.choices.outliers)):
        if weight.name in chosen:
            recipe, found = constant(chosen[weight.name])
            constants |= found
            made.append(Weight(Value(f"{name}.{recipe.get('digest')}", infer(recipe)), recipe))
    return tuple(made)


def _quantized(
    n: Node, parts: list[Weight], row: Scheme, turned: int, taken: tuple[Weight, ...], graph: Graph, rows: "_Rows"
) -> list[Node]:
    """The product over the parts, behind the rounding of its rows if that stands nowhere yet."""
    before: list[Node] = []
    inputs = n.inputs
    if row.act and n.op != "embedding":
        key = (inputs[0], row.act, turned, row.rows_group, taken)
        if key not in rows:
            rows[key] = _rounding(*key, n, graph)
            before.append(rows[key])
        inputs = (*(v.name for v in rows[key].outputs), *inputs[1:])
    reader = _over(n, inputs, WEIGHT[n.op] + len(inputs) - len(n.inputs), parts)
    return [*before, replace(reader, op=f"q{n.op}", attrs=(*reader.attrs, ("scheme", row.name)))]


def _over(n: Node, inputs: tuple[str, ...], at: int, weights: list[Weight]) -> Node:
    """The node with its weight, input `at`, in its storage."""
    names = tuple(w.name for w in weights)
    attrs = tuple((k, v) for k, v in n.attrs if k != "store")
    return replace(n, inputs=(*inputs[:at], *names, *inputs[at + 1 :]), attrs=attrs)


def _rounding(
    name: str, dtype: str, turned: int, group: int | None, taken: tuple[Weight, ...], reader: Node, graph: Graph
) -> Node:
    shared = (("group", group),) if group else ()
    attrs = (("dtype", dtype), *((("hadamard", turned),) if turned > 1 else ()), *shared)
    types = OPS["quantize_rows"].infer(dict(attrs), [graph.types[name], *(w.value.type for w in taken)])
    stem = name + codes_tail(dict(attrs), [w.name for w in taken])
    outputs = tuple(Value(f"{stem}{tail}", t) for tail, t in zip(("", ".s"), types, strict=True))
    return Node("quantize_rows", (name, *(w.name for w in taken)), outputs, attrs, reader.loc)


def narrow(recipe: Recipe, dtype: str) -> Recipe:
    """The recipe cast to `dtype`, with the cast moved down to the leaves so that nothing is widened first."""
    if infer(recipe).dtype == dtype:
        return recipe
    if recipe.op in MOVES:
        return replace(recipe, inputs=tuple(narrow(r, dtype) for r in recipe.inputs))
    if recipe.op == "cast" and recipe.get("dtype") == "f32" and infer(recipe.inputs[0]).dtype == dtype:
        return recipe.inputs[0]  # widened from this very dtype: narrowing gives it back exactly
    return step("cast", recipe, dtype=dtype)


def lossless(recipe: Recipe) -> Recipe:
    """The recipe without casts to float32, which quantizing does itself, a few rows at a time."""
    if recipe.op in MOVES:
        inputs = tuple(lossless(r) for r in recipe.inputs)
        return replace(recipe, inputs=inputs) if len({infer(r).dtype for r in inputs}) == 1 else recipe
    if recipe.op == "cast" and recipe.get("dtype") == "f32":
        return recipe.inputs[0]
    return recipe
