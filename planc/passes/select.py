"""Every node gets a kernel: weights take the packed layout that it reads, views that it cannot read are copied.

CPU kernels read weights packed in blocks of output channels; CUDA kernels read rows, with codes of 4 bits in pairs.

A node without a kernel stops the build here, before any work on weights, with the kernels that exist.
"""

from dataclasses import replace

from planc.codegen.cuda.call import Bucket, calls, page_table
from planc.codegen.kernel import choose, layouts
from planc.compiler.ir.graph import Graph, Node, Value, Weight
from planc.compiler.ir.ops import OPS
from planc.compiler.ir.recipe import step
from planc.compiler.ir.types import PACKED, PAIRS, TensorType
from planc.errors import PlancError
from planc.passes.options import Options


def select(graph: Graph, options: Options) -> tuple[Graph, int]:
    """Settles layouts; counts the nodes that have a kernel."""
    if options.target.kind == "cuda":
        return _for_cuda(graph, options)
    graph = _pack(_copy_views(graph, options), options)
    _check_views(graph)
    kernels = [n for n in graph.nodes if not OPS[n.op].view]
    for n in kernels:
        choose(n, _types(n, graph), options.target)
    return graph, len(kernels)


def _for_cuda(graph: Graph, options: Options) -> tuple[Graph, int]:
    paired = tuple(_packed(w, PAIRS) if w.value.type.dtype == "u4" else w for w in graph.weights)
    graph = _copy_views(replace(graph, weights=paired), options)
    kernels = [n for n in graph.nodes if not OPS[n.op].view]
    for n in kernels:
        if OPS[n.op].collective:  # the library of the ranks runs it
            continue
        _calls(n, _types(n, graph), options)
    return graph, len(kernels)


def _calls(n: Node, types: list[TensorType], options: Options) -> None:
    """PlancError when no CUDA kernel takes these inputs."""
    limits = options.dims
    bucket = Bucket(limits["T"], limits["S"], limits["R"])
    calls(
        n,
        dict(zip(n.inputs, types, strict=True)) | page_table(options.sequence_pages),
        options.target.sm.number,
        bucket,
    )


def has_kernel(n: Node, graph: Graph, options: Options) -> bool:
    """Whether a kernel of the target takes the node, its weights packed as they will be, other inputs as they are."""
    types = _types(n, graph)
    try:
        if options.target.kind == "cuda":
            _calls(n, types, options)
        else:
            wanted = layouts(n, types, options.target)
            packed = [replace(t, layout=w) if w in PACKED else t for t, w in zip(types, wanted, strict=True)]
            choose(n, packed, options.target)
    except PlancError:
        return False
    return True


def _types(n: Node, graph: Graph) -> list[TensorType]:
    return [graph.types[i] for i in n.inputs]


def _is_strided(t: TensorType) -> bool:
    return t.layout.startswith("strides:")


def _check_views(graph: Graph) -> None:
    """A part of a value without tokens is typed as dense, as a weight's is: it must lie in one piece to be a view."""
    for n in graph.nodes:
        shape = graph.types[n.inputs[0]].shape if n.op == "slice" else ()
        if shape and isinstance(shape[0], int) and any(d != 1 for d in shape[: int(n.attr("axis"))]):  # type: ignore[arg-type]
            raise PlancError(
                f"select: slice at {n.loc or 'top level'}: %{n.inputs[0]} {graph.types[n.inputs[0]]} has no tokens, "
                "and a part of each of its rows is no view; no kernel copies it yet."
            )


def _copy_views(graph: Graph, options: Options) -> Graph:
    """Puts a dense copy before each node that cannot read a strided view as it is."""
    inputs = {v.name for v in graph.inputs}
    replaced: dict[Node, list[Node]] = {}
    for n in graph.nodes:
        # a view looks into the arena, where a graph input has no place
        views_input = [i for i in n.inputs[:1] if i in inputs]
        wrong = views_input if OPS[n.op].view else _unreadable(n, graph, options)
        if wrong:
            copies = {i: _copy(i, n, graph) for i in wrong}
            reader = replace(n, inputs=tuple(copies[i].out.name if i in copies else i for i in n.inputs))
            replaced[n] = [*copies.values(), reader]
    return graph.rewrite(dict(replaced)).retyped() if replaced else graph


def _unreadable(n: Node, graph: Graph, options: Options) -> list[str]:
    types = _types(n, graph)
    strided = [i for i, t in zip(n.inputs, types, strict=True) if _is_strided(t)]
    if not strided:
        return []
    if options.target.kind == "cuda" and OPS[n.op].collective:
        return strided
    try:
        if options.target.kind == "cuda":
            _calls(n, types, options)
            return []
        want = layouts(n, types, options.target)
    except PlancError:
        return list(dict.fromkeys(strided))  # no kernel reads these views; dense inputs may have one
    return [i for i, t, w in zip(n.inputs, types, want, strict=True) if _is_strided(t) and w != "any"]


def _copy(name: str, reader: Node, graph: Graph) -> Node:
    t = graph.types[name]
    out = Value(f"{name}.dense.{reader.out.name if reader.outputs else reader.op}", TensorType(t.dtype, t.shape))
    return Node("copy", (name,), (out,), (), reader.loc)


def _pack(graph: Graph, options: Options) -> Graph:
    """Packs each weight that a kernel wants packed; its other readers must take it so, as a tied embedding does."""
    wanted: dict[str, str] = {}
    for n in graph.nodes:
        if OPS[n.op].view:
            continue
        for name, layout in zip(n.inputs, layouts(n, _types(n, graph), options.target), strict=True):
            if layout in PACKED:
                if name not in graph.weight_by_name:
                    raise PlancError(f"select: {n.op} at {n.loc} multiplies two activations; no kernel does that yet.")
                wanted[name] = layout
    packed = tuple(_packed(w, wanted.get(w.name)) for w in graph.weights)
    return replace(graph, weights=packed)


def _packed(w: Weight, layout: str | None) -> Weight:
    if layout is None or w.value.type.layout == layout:
        return w
    value = replace(w.value, type=replace(w.value.type, layout=layout))
    return Weight(value, step("pack", w.recipe, layout=layout))
