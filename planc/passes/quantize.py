"""linear(x, w) -> qlinear(x, codes, scales), or the same linear over a narrower w: the weights take the build's dtype.

Norms, biases and tables stay float32. A tied embedding follows the head; an untied one is never narrower than bf16.
"""

from dataclasses import replace

from planc.compiler.ir.graph import Graph, Node, Value, Weight
from planc.compiler.ir.quant import SCHEMES
from planc.compiler.ir.recipe import Recipe, infer, step
from planc.passes.options import Options

_WEIGHT = {"embedding": 0, "linear": 1, "expert_linear": 2}  # op -> which input is the weight
_MOVES = ("concat", "slice", "reshape", "transpose")


def quantize(graph: Graph, options: Options) -> tuple[Graph, int]:
    """Gives every weight of a product or an embedding its storage; counts the nodes that read one."""
    nodes = weighted(graph)
    products = {n.inputs[_WEIGHT[n.op]] for n in nodes if n.op != "embedding"}
    replaced: dict[Node, Node] = {}
    weights: dict[str, Weight] = {}
    for n in nodes:
        at = _WEIGHT[n.op]
        name = n.inputs[at]
        scheme = options.dtype if name in products or options.dtype not in SCHEMES else "bf16"
        parts = _stored(graph.weight_by_name[name], scheme)
        weights |= {w.name: w for w in parts}
        replaced[n] = _reader(n, at, parts, scheme)
    return graph.rewrite(dict(replaced), add_weights=weights.values()), len(replaced)


def weighted(graph: Graph) -> list[Node]:
    """Linear layers, experts and embeddings whose weight comes from the checkpoint: each must get its storage."""
    out = []
    for n in graph.nodes:
        at = _WEIGHT.get(n.op)
        weight = graph.weight_by_name.get(n.inputs[at]) if at is not None else None
        if weight and weight.recipe.loads:
            out.append(n)
    return out


def _stored(weight: Weight, scheme: str) -> list[Weight]:
    name, recipe = weight.name, weight.recipe
    if scheme not in SCHEMES:
        narrowed = narrow(recipe, scheme)
        return [Weight(Value(f"{name}.{scheme}", infer(narrowed)), narrowed)]
    wide = _lossless(recipe)
    parts = [(p, step("quantize", wide, scheme=scheme, part=p)) for p in ("q", "s")]
    return [Weight(Value(f"{name}.{p}", infer(r)), r) for p, r in parts]


def _reader(n: Node, at: int, parts: list[Weight], scheme: str) -> Node:
    names = tuple(w.name for w in parts)
    inputs = (*n.inputs[:at], *names, *n.inputs[at + 1 :])
    if scheme not in SCHEMES:
        return replace(n, inputs=inputs)
    attrs = (*n.attrs, ("scheme", scheme))
    return replace(n, op=f"q{n.op}", inputs=inputs, attrs=attrs)


def narrow(recipe: Recipe, dtype: str) -> Recipe:
    """The recipe cast to `dtype`, with the cast moved down to the leaves so that nothing is widened first."""
    if infer(recipe).dtype == dtype:
        return recipe
    if recipe.op in _MOVES:
        return replace(recipe, inputs=tuple(narrow(r, dtype) for r in recipe.inputs))
    if recipe.op == "cast" and recipe.get("dtype") == "f32" and infer(recipe.inputs[0]).dtype == dtype:
        return recipe.inputs[0]  # widened from this very dtype: narrowing gives it back exactly
    return step("cast", recipe, dtype=dtype)


def _lossless(recipe: Recipe) -> Recipe:
    """The recipe without casts to float32, which quantizing does itself, a few rows at a time."""
    if recipe.op in _MOVES:
        inputs = tuple(_lossless(r) for r in recipe.inputs)
        return replace(recipe, inputs=inputs) if len({infer(r).dtype for r in inputs}) == 1 else recipe
    if recipe.op == "cast" and recipe.get("dtype") == "f32":
        return recipe.inputs[0]
    return recipe
