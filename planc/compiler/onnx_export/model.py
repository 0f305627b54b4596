"""A planned graph as an ONNX model without its weights: in goes the graph, out come the header and the graph proto.

`input_ids` int64[1, T] and, where a node reads them, `position_ids` int64[1, T] give `logits` float32[1, T, vocab]: all
tokens are one sequence from its start, and every row has logits.
"""

from collections.abc import Mapping

from onnx import GraphProto, ModelProto, StringStringEntryProto, ValueInfoProto, helper

from planc.compiler.ir.graph import Graph, Node
from planc.compiler.ir.types import TensorType
from planc.compiler.onnx_export.emitter import ELEMENT, Emitter
from planc.compiler.onnx_export.structure import ROWS
from planc.compiler.onnx_export.table import FORMS
from planc.errors import PlancError
from planc.passes.unfused import unfused

OPSET = 20  # the first with Gelu
IR_VERSION = 9  # what opset 20 came with; older readers refuse newer ones
_IDS, _POSITIONS, _LOGITS = "input_ids", "position_ids", "logits"
_INPUTS = {"ids": _IDS, "positions": _POSITIONS}
_PAGING = frozenset({"slots", "page_table", "query_start", "kv", ROWS})  # of a step: a prompt alone needs none


def header(producer: str, version: str, doc: str, about: Mapping[str, str]) -> ModelProto:
    """The model but for its graph."""
    return ModelProto(
        ir_version=IR_VERSION,
        producer_name=producer,
        producer_version=version,
        doc_string=doc,
        opset_import=[helper.make_opsetid("", OPSET)],
        metadata_props=[StringStringEntryProto(key=k, value=v) for k, v in about.items()],
    )


def graph_proto(graph: Graph) -> GraphProto:
    """The graph without its weights, which are initializers of the same names and of their logical shapes.

    Raises PlancError naming a node that has no ONNX form.
    """
    graph = unfused(graph)
    rename = {v: f"{v}/rows" for v in (_IDS, _POSITIONS, _LOGITS) if v in graph.types}
    e = Emitter(graph, rename=rename)
    given = [name for name in _INPUTS if name == "ids" or _reads(graph, name)]
    for name in given:
        e.once(name, lambda source=_INPUTS[name]: _flat(e, source))  # type: ignore[misc]
    for n in graph.nodes:
        _emit(e, n)
    (output,) = graph.outputs
    e.once(_LOGITS, lambda: e.op("Unsqueeze", e.value(output), e.ints(0)))
    vocab = int(graph.types[output].shape[-1])
    return helper.make_graph(
        e.nodes,
        graph.name,
        [helper.make_tensor_value_info(_INPUTS[name], ELEMENT["i64"], (1, "T")) for name in given],
        [helper.make_tensor_value_info(_LOGITS, ELEMENT["f32"], (1, "T", vocab))],
        list(e.shared.constants.values()),
        value_info=_described(e, graph),
    )


def _flat(e: Emitter, name: str) -> str:
    """[1, T] of int64 to [T] of int32, as the graph has them."""
    return e.cast(e.op("Reshape", name, e.ints(-1)), "i32")


def _reads(graph: Graph, name: str) -> bool:
    """Whether a node needs it; attention goes by the order of the tokens."""
    return any(name in n.inputs for n in graph.nodes if n.op != "paged_attention")


def _emit(e: Emitter, n: Node) -> None:
    if n.op == "take_rows" and n.inputs[1] == ROWS:
        e.alias(n.out.name, n.inputs[0])
        return
    at = f"{n.op} at {n.loc or 'top level'}"
    if n.op not in FORMS:
        raise PlancError(f"{at} has no ONNX form yet; planc inspect --graph shows the graph.")
    paging = n.op in ("kv_append", "paged_attention")
    if not paging and _PAGING & set(n.inputs):
        raise PlancError(f"{at} reads %{min(_PAGING & set(n.inputs))}, which a prompt alone does not have.")
    e.node(n, FORMS[n.op])


def _described(e: Emitter, graph: Graph) -> list[ValueInfoProto]:
    """The types of the graph's values, which viewers show."""
    values = {e.value(v.name): v.type for n in graph.nodes for v in n.outputs}
    return [_value_info(name, t) for name, t in values.items()]


def _value_info(name: str, t: TensorType) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, ELEMENT[t.dtype], ["T" if d == "R" else d for d in t.shape])
