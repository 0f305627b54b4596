"""The ONNX form of every op, run by onnxruntime, against the op's reference."""

from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from planc.compiler.ir.graph import Graph, Node, Value
from planc.compiler.ir.ops import OPS
from planc.compiler.ir.types import TensorType
from planc.compiler.onnx_export.emitter import ELEMENT, Emitter
from planc.compiler.onnx_export.model import IR_VERSION, OPSET
from planc.compiler.onnx_export.table import FORMS
from tests.compiler.ir.samples import Sample, samples

ALL = list(samples())
PAGED = {"kv_append", "paged_attention"}
# ONNX does not say what an order makes of a NaN.
ORDERS = {"topk", "argmax"}


def graph_of(s: Sample) -> Graph:
    """The sample as a graph of one node; its ids say how many tokens there are."""
    types = s.types()
    given = [Value(f"x{i}", t) for i, t in enumerate(types)]
    attrs = {k: v for k, v in s.attrs.items() if k in OPS[s.op].attrs}
    made = OPS[s.op].infer(s.attrs, types)
    outputs = tuple(Value(f"y{i}", t) for i, t in enumerate(made))
    node = Node(s.op, tuple(v.name for v in given), outputs, tuple(attrs.items()), "the.sample")
    inputs = (Value("ids", TensorType("i32", ("T",))), *given)
    return Graph("sample", inputs, (), (node,), tuple(v.name for v in outputs))


def tokens_of(s: Sample) -> int:
    if "length" in s.attrs:
        return int(s.attrs["length"])
    return next((len(a) for a, t in zip(s.args, s.tokens, strict=False) if t), 1)


def session(e: Emitter, inputs: Sequence[Value], outputs: Sequence[Value]) -> onnxruntime.InferenceSession:
    def described(v: Value):
        return helper.make_tensor_value_info(v.name, ELEMENT[v.type.dtype], [None] * len(v.type.shape))

    graph = helper.make_graph(
        e.nodes, "test", [*map(described, inputs)], [*map(described, outputs)], [*e.shared.constants.values()]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    onnx.checker.check_model(model)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def run(s: Sample, args: Sequence[np.ndarray]) -> list[np.ndarray]:
    graph = graph_of(s)
    (node,) = graph.nodes
    e = Emitter(graph)
    e.node(node, FORMS[s.op])
    feed = {"ids": np.zeros(tokens_of(s), np.int32)} | {f"x{i}": a for i, a in enumerate(args)}
    return session(e, graph.inputs, node.outputs).run(None, feed)


def logical(s: Sample) -> list[np.ndarray]:
    """The sample's arrays as they are written: unpacked."""
    from planc.compiler.ir.refs import logical as unpacked

    return [unpacked(a, t) for a, t in zip(s.args, s.types(), strict=True)]


def test_every_op_has_a_form() -> None:
    assert set(FORMS) == set(OPS)


@pytest.mark.parametrize("s", ALL, ids=lambda s: s.op)
def test_form_equals_reference(s: Sample) -> None:
    args = logical(s)
    if s.op in ORDERS:
        args = [np.nan_to_num(a, nan=0.25, posinf=np.inf, neginf=-np.inf) for a in args]
    types = [TensorType(t.dtype, t.shape) for t in s.types()]
    want = OPS[s.op].ref(s.attrs, args, types)
    made = run(s, args)
    assert len(made) == len(want)
    for got, w in zip(made, want, strict=True):
        assert got.dtype == w.dtype
        assert got.shape == w.shape
        np.testing.assert_allclose(got.astype(np.float64), w.astype(np.float64), rtol=2e-5, atol=2e-6)
