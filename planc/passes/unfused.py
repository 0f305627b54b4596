"""planned graph -> the same by the ops that its last fusions stand for, with every result as wide as it is computed."""

from planc.compiler.ir.graph import Graph
from planc.passes import fuse_append, fuse_gate, fuse_quantize
from planc.passes.narrow import widened


def unfused(graph: Graph) -> Graph:
    """The graph before `fuse_append`, `fuse_gate`, `fuse_quantize` and `narrow`, for what knows none of their ops."""
    return fuse_append.apart(fuse_gate.apart(fuse_quantize.apart(widened(graph))))
