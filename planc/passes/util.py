"""Small helpers that several passes share: fresh names, topological order, const-only weights."""

import numpy as np

from planc.compiler.ir.graph import Graph, Value, Weight
from planc.compiler.ir.recipe import constant, infer


def is_constant(weight: Weight) -> bool:
    """True when the weight comes from the compiler alone, not from the checkpoint."""
    return not weight.recipe.loads


def const_weight(array: np.ndarray, prefix: str) -> tuple[Weight, dict[str, np.ndarray]]:
    """A weight that holds `array`, named by its content so that equal ones are one, and its constants entry."""
    recipe, entry = constant(array)
    key = next(iter(entry))
    return Weight(Value(f"{prefix}.{key}", infer(recipe)), recipe), entry


def readers(graph: Graph, name: str) -> int:
    """How many nodes and outputs read a value."""
    return len(graph.users[name]) + graph.outputs.count(name)
