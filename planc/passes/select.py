"""stub"""
from planc.compiler.ir.graph import Graph
from planc.passes.options import Options
def select(graph: Graph, options: Options) -> tuple[Graph, int]:
    return graph, 0
