"""linear -> its rank's slice of it, before anything is merged or quantized, so that no scale ever needs splitting.

One rank is the identity. The rule of each op is its `shard` row in the op table.
"""

from planc.compiler.ir.graph import Graph
from planc.errors import UsageError
from planc.passes.options import Options


def shard(graph: Graph, options: Options) -> tuple[Graph, int]:
    """The graph of one rank; UsageError for more ranks than this version splits over."""
    if options.tp != 1:
        raise UsageError(f"{options.tp} ranks were asked for; plans of more than one are not built yet.")
    return graph, 0
