"""The interpreter: in go a graph and arrays for its inputs and weights, out come its outputs, by the references."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from planc.compiler.ir.graph import Graph, Node
from planc.compiler.ir.ops import OPS
from planc.compiler.ir.recipe import evaluate

Env = dict[str, np.ndarray]


def run(graph: Graph, inputs: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Outputs by name. `inputs` has every graph input that a node reads; the KV cache array is changed in place."""
    env: Env = dict(inputs) | dict(weights)
    for n in graph.nodes:
        execute(n, env, graph)
    return {o: env[o] for o in graph.outputs}


def run_ranks(
    graph: Graph, inputs: Sequence[Mapping[str, np.ndarray]], weights: Sequence[Mapping[str, np.ndarray]]
) -> list[dict[str, np.ndarray]]:
    """Like `run` for all ranks of a sharded graph, which run in step: each has its own inputs, cache and weights."""
    envs: list[Env] = [dict(i) | dict(w) for i, w in zip(inputs, weights, strict=True)]
    for n in graph.nodes:
        if not OPS[n.op].collective:
            for env in envs:
                execute(n, env, graph)
            continue
        (joined,) = OPS[n.op].ref(dict(n.attrs), [env[n.inputs[0]] for env in envs], [graph.types[n.inputs[0]]])
        for env in envs:
            env[n.out.name] = joined.copy()
    return [{o: env[o] for o in graph.outputs} for env in envs]


def execute(node: Node, env: Env, graph: Graph) -> None:
    """Runs one node: reads its inputs from `env`, adds its outputs. ValueError for one that joins ranks."""
    if OPS[node.op].collective:
        raise ValueError(f"{node.op} at {node.loc or 'top level'} joins all ranks; run_ranks has them")
    types = [graph.types[i] for i in node.inputs]
    attrs = dict(node.attrs)
    if "rows" in attrs:
        attrs["length"] = _length(str(attrs["rows"]), env, graph)
    results = OPS[node.op].ref(attrs, [env[i] for i in node.inputs], types)
    for value, array in zip(node.outputs, results, strict=True):
        env[value.name] = array


def _length(symbol: str, env: Env, graph: Graph) -> int:
    """How many rows this step has of an axis that no input of the node bears."""
    for name, array in env.items():
        t = graph.types.get(name)
        if t is not None and symbol in t.shape:
            return int(array.shape[t.shape.index(symbol)])
    raise KeyError(f"no value of this step has an axis {symbol}")


def weights_of(
    graph: Graph, read: Callable[[str], np.ndarray], constants: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Every weight of the graph, evaluated; for tests and small models."""
    return {w.name: evaluate(w.recipe, read, constants) for w in graph.weights}
