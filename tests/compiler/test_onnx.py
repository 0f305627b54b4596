"""ONNX forms of ops, run by onnxruntime, against the ops' references; weights without packing; files in pieces."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, helper, numpy_helper

from planc.compiler.ir.gated import NAMES as GATED
from planc.compiler.ir.graph import Graph, Node, Value, Weight
from planc.compiler.ir.ops import OPS
from planc.compiler.ir.packing import pack, packed_shape
from planc.compiler.ir.quant import LIMITS, quantize_rows
from planc.compiler.ir.recipe import load
from planc.compiler.ir.refs import logical
from planc.compiler.ir.rounded import NAMES as ROUNDED
from planc.compiler.ir.types import DTYPES, PACKED, Attr, TensorType
from planc.compiler.onnx_export import weights, writer
from planc.compiler.onnx_export.emitter import ELEMENT, Emitter
from planc.compiler.onnx_export.model import IR_VERSION, OPSET, graph_proto
from planc.compiler.onnx_export.table import FORMS
from planc.errors import PlancError
from planc.passes import fuse_gate, fuse_quantize
from planc.plans.tensors import Writer
from tests.compiler.ir.samples import MASKS, Sample, samples

ALL = [s for s in samples() if not OPS[s.op].collective]  # what joins ranks is not exported
ORDERS = {"topk", "argmax", "amax", "amin"}  # where ONNX leaves open what becomes of a NaN


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


def run(graph: Graph, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    """What onnxruntime makes of the nodes of a graph without weights; results in bfloat16 are widened."""
    graph = fuse_gate.apart(fuse_quantize.apart(graph))
    e = Emitter(graph)
    for n in graph.nodes:
        e.node(n, FORMS[n.op])
    narrow = [o for o in graph.outputs if graph.types[o].dtype == "bf16"]
    e.nodes += [helper.make_node("Cast", [o], [f"{o}.wide"], to=ELEMENT["f32"]) for o in narrow]
    outputs = [Value(f"{o}.wide", TensorType("f32", graph.types[o].shape)) if o in narrow else o for o in graph.outputs]
    model = _model(e, graph.inputs, [v if isinstance(v, Value) else Value(v, graph.types[v]) for v in outputs])
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    given = {name: _ort(a) for name, a in feed.items()}
    made = session.run_with_ort_values(None, given)
    eight = [o for o in graph.outputs if graph.types[o].dtype == "f8e4m3"]
    return [
        v.numpy().view(DTYPES["f8e4m3"]) if o in eight else v.numpy() for o, v in zip(graph.outputs, made, strict=True)
    ]


def _ort(a: np.ndarray) -> onnxruntime.OrtValue:
    """numpy has no float8 and no bfloat16 of its own: they go as bytes."""
    for name, plain in (("f8e4m3", np.uint8), ("bf16", np.uint16)):
        if a.dtype == DTYPES[name]:
            return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(a.view(plain), ELEMENT[name])
    return onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(a))


def _model(e: Emitter, inputs: Sequence[Value], outputs: Sequence[Value]) -> ModelProto:
    def described(v: Value) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(v.name, ELEMENT[v.type.dtype], [None] * len(v.type.shape))

    constants = list(e.shared.constants.values())
    graph = helper.make_graph(e.nodes, "test", [*map(described, inputs)], [*map(described, outputs)], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)


def test_every_op_has_a_form() -> None:
    taken_apart = {"rotary_append", *GATED, *ROUNDED}
    assert set(FORMS) == {name for name, op in OPS.items() if not op.collective} - taken_apart


@pytest.mark.parametrize("s", ALL, ids=lambda s: s.op)
def test_form_equals_reference(s: Sample) -> None:
    args = [logical(a, t) for a, t in zip(s.args, s.types(), strict=True)]
    if s.op in ORDERS:
        args = [np.nan_to_num(a, nan=0.25, posinf=np.inf, neginf=-np.inf) for a in args]
    types = [TensorType(t.dtype, t.shape) for t in s.types()]
    want = OPS[s.op].ref(s.attrs, args, types)
    made = run(graph_of(s), {"ids": np.zeros(tokens_of(s), np.int32)} | {f"x{i}": a for i, a in enumerate(args)})
    assert len(made) == len(want)
    for got, w in zip(made, want, strict=True):
        assert got.shape == w.shape
        assert got.dtype == (np.float32 if w.dtype == DTYPES["bf16"] else w.dtype)
        np.testing.assert_allclose(
            got.astype(np.float64), w.astype(np.float64), rtol=2e-5, atol=1e-4 if s.op.startswith("q") else 2e-6
        )


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """As a cache of `dtype` holds it."""
    if dtype not in LIMITS:
        return x.astype(DTYPES[dtype]).astype(np.float32)
    codes, scale = quantize_rows(x, dtype)
    return codes.astype(np.float32) * scale[..., None]


@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m["kind"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f8e3m4", "i8"])
def test_paged_attention_is_attention_over_the_prompt(mask: dict[str, Attr], dtype: str) -> None:
    """Two layers that share keys and values; a cache of fewer bits rounds them."""
    rng = np.random.default_rng(0)
    shapes = {"q": (9, 6, 8), "k": (9, 2, 8), "v": (9, 2, 5)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["k"][0, 0] = arrays["v"][3, 1] = 0.0
    layout = {"layer": 3, "heads": 2, "k_dim": 8, "v_dim": 5, "block": 16, "dtype": dtype}
    layout |= {"k_offset": 0, "v_offset": 1024, "page_bytes": 4096}
    if dtype in LIMITS:
        layout |= {"k_scale_offset": 2048, "v_scale_offset": 3072}
    attrs = {"scale": 0.3, "softcap": 5.0, **mask}
    types = {name: TensorType("f32", ("T", *shape[1:])) for name, shape in shapes.items()}
    made = TensorType("f32", ("T", 6, 5))
    paged = ("q", "kv", "page_table", "query_start", "positions")
    graph = Graph(
        "paged",
        (Value("ids", TensorType("i32", ("T",))), *(Value(name, t) for name, t in types.items())),
        (),
        (
            Node("kv_append", ("k", "v", "slots", "kv"), (), tuple(layout.items())),
            Node("paged_attention", paged, (Value("a", made),), tuple((layout | attrs).items())),
            Node("paged_attention", paged, (Value("b", made),), tuple((layout | attrs).items())),
        ),
        ("a", "b"),
    )
    results = run(graph, {"ids": np.zeros(9, np.int32), **arrays})
    k, v = (rounded(arrays[name], dtype) for name in "kv")
    (want,) = OPS["attention"].ref({**attrs, "layer": 3}, (arrays["q"], k, v), ())
    for got in results:
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def test_an_index_that_was_found_needs_no_check() -> None:
    """The places that topk found in 8 are inside of 8; those of anything else may not be."""
    x = Value("x", TensorType("f32", ("T", 8)))
    ids = Value("ids", TensorType("i32", ("T",)))
    values, index = OPS["topk"].infer({"k": 2, "largest": True}, [x.type])
    found = Node("topk", ("x",), (Value("v", values), Value("i", index)), (("k", 2), ("largest", True)))
    picked = Node("gather", ("x", "i"), (Value("y", values),))
    graph = Graph("found", (ids, x), (), (found, picked), ("y",))
    e = Emitter(graph)
    for n in graph.nodes:
        e.node(n, FORMS[n.op])
    assert [n.op_type for n in e.nodes] == ["TopK", "Cast", "GatherElements"]
    assert [n.name for n in e.nodes] == ["v", "i", "y"]


def test_nodes_have_the_names_of_the_graph() -> None:
    x = Value("x", TensorType("f32", ("T", 8)))
    nodes = (
        Node("silu", ("x",), (Value("l0.act", x.type),), (), "model.layers.0.mlp"),
        Node("copy", ("l0.act",), (Value("logits", x.type),), (), "lm_head"),
    )
    proto = graph_proto(Graph("named", (Value("ids", TensorType("i32", ("T",))), x), (), nodes, ("logits",)))
    told = {n.name: (n.op_type, n.doc_string) for n in proto.node}
    assert told["l0.act/Sigmoid"] == ("Sigmoid", "model.layers.0.mlp")
    assert told["l0.act"] == ("Mul", "model.layers.0.mlp")
    assert told["logits/rows"] == ("Identity", "lm_head")
    assert told["logits"][0] == "Unsqueeze"
    assert {v.name for v in proto.value_info} == {"l0.act", "logits/rows"}


def test_a_node_without_a_form_is_named() -> None:
    t = TensorType("f32", ("T", 8))
    node = Node("nonsense", ("x",), (Value("y", t),), (), "model.here")
    graph = Graph("odd", (Value("ids", TensorType("i32", ("T",))), Value("x", t)), (), (node,), ("y",))
    with pytest.raises(PlancError, match=r"nonsense at model\.here has no ONNX form"):
        graph_proto(graph)


STORED = {
    "matrix": ("f32", (70, 9), "n64"),
    "wide": ("bf16", (130, 7), "n64k2"),
    "codes": ("i8", (200, 10), "n64u4"),
    "experts": ("i8", (3, 70, 10), "n64u4"),
    "norm": ("f32", (9,), "row"),
    "table": ("bf16", (50, 9), "row"),
}


@pytest.fixture
def stored(tmp_path: Path) -> tuple[weights.Weights, dict[str, np.ndarray]]:
    """A plan's weight file with every layout, and the arrays that were packed."""
    rng = np.random.default_rng(0)
    arrays = {n: rng.integers(-99, 99, s).astype(DTYPES[d]) for n, (d, s, _) in STORED.items()}
    types = {n: TensorType(d, s, layout) for n, (d, s, layout) in STORED.items()}
    shapes = {n: packed_shape(t.shape, t.layout) if t.layout in PACKED else t.shape for n, t in types.items()}
    with Writer(tmp_path / "w", [(n, t.dtype, shapes[n], t.nbytes()) for n, t in types.items()]) as out:
        for name, t in types.items():
            out.write(name, pack(arrays[name], t.layout) if t.layout in PACKED else arrays[name])
    held = tuple(Weight(Value(n, t), load(n, t.dtype, t.shape)) for n, t in types.items())
    plan = SimpleNamespace(weight_files=("w",))
    return weights.Weights(tmp_path, plan, Graph("g", (), held, (), ())), arrays


@pytest.mark.parametrize("piece", [1, 2000, 1 << 20])
def test_weights_come_unpacked_and_in_pieces(stored, monkeypatch, piece: int) -> None:
    monkeypatch.setattr(weights, "_PIECE", piece)
    found, arrays = stored
    for name, want in arrays.items():
        pieces = list(found.pieces(name))
        assert b"".join(p.tobytes() for p in pieces) == want.tobytes(), name
        assert found.nbytes(name) == want.nbytes
        assert piece > 1 or len(pieces) >= -(-want.shape[-2] // 64) if want.ndim > 1 else True


def test_a_weight_that_is_not_the_graphs_is_named(stored, tmp_path: Path) -> None:
    plan = SimpleNamespace(weight_files=("w",))
    for name, t, message in (
        ("absent", TensorType("f32", (3,)), "has no weight absent"),
        ("norm", TensorType("f32", (8,)), "norm is f32 of 36 B"),
    ):
        graph = Graph("g", (), (Weight(Value(name, t), load(name, t.dtype, t.shape)),), (), ())
        with pytest.raises(PlancError, match=message):
            weights.Weights(tmp_path, plan, graph)


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_the_file_is_an_onnx_file(stored, tmp_path: Path, monkeypatch, limit: int) -> None:
    """Written piece by piece, and read by the protobuf library: large weights beside it when it may hold nothing."""
    monkeypatch.setattr(writer, "INLINE_LIMIT", limit)
    monkeypatch.setattr(writer, "_SMALL", 64)
    found, arrays = stored
    graph = onnx.GraphProto(name="held")
    layout = writer.layout(found, graph)
    done: list[int] = []
    model, data = BytesIO(), BytesIO()
    writer.write_data(data, found, layout, done.append)
    writer.write_model(model, ModelProto(ir_version=IR_VERSION), graph, found, layout, "x.data", done.append)
    assert layout.external == (limit == 0)
    assert sum(done) == sum(a.nbytes for a in arrays.values())
    (tmp_path / "x.data").write_bytes(data.getvalue())
    (tmp_path / "x").write_bytes(model.getvalue())
    read = onnx.load(tmp_path / "x")
    assert read.SerializeToString()[:2] == model.getvalue()[:2]
    made = {t.name: numpy_helper.to_array(t) for t in read.graph.initializer}
    assert made.keys() == arrays.keys()
    for name, want in arrays.items():
        assert made[name].shape == want.shape
        assert (made[name].astype(np.float64) == want.astype(np.float64)).all(), name
