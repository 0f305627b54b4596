"""Op -> its ONNX form. Every op of a final graph of one rank has one; a test holds this table against the op table."""

from collections.abc import Callable, Mapping, Sequence

from planc.compiler.ir.graph import Node
from planc.compiler.ir.refs import BINARY, COMPARE, REDUCE, UNARY
from planc.compiler.onnx_export import attention, experts, pointwise, products, quantized, structure
from planc.compiler.onnx_export.emitter import Emitter

Form = Callable[[Emitter, Node], Sequence[str]]
FORMS: Mapping[str, Form] = {
    **dict.fromkeys(UNARY, pointwise.unary),
    **dict.fromkeys(BINARY, pointwise.binary),
    **dict.fromkeys(COMPARE, pointwise.compare),
    **dict.fromkeys(REDUCE, structure.reduce),
    "gelu": pointwise.gelu,
    "act_mul": pointwise.act_mul,
    "where": pointwise.where,
    "fused": pointwise.fused_chain,
    "cast": structure.cast,
    "reshape": structure.reshape,
    "transpose": structure.transpose,
    "slice": structure.slice_,
    "concat": structure.concat,
    "expand": structure.expand,
    "copy": structure.copy,
    "take_rows": structure.take_rows,
    "embedding": structure.embedding,
    "qembedding": quantized.qembedding,
    "softmax": structure.softmax,
    "cumsum": structure.cumsum,
    "argmax": structure.argmax,
    "topk": structure.topk,
    "gather": structure.gather,
    "scatter": structure.scatter,
    "linear": products.linear,
    "quantize_rows": quantized.quantize_rows,
    "qlinear": quantized.qlinear,
    "matmul": products.matmul,
    "weighted_sum": products.weighted_sum,
    "rms_norm": products.rms_norm,
    "layer_norm": products.layer_norm,
    "add_rms_norm": products.add_rms_norm,
    "add_layer_norm": products.add_layer_norm,
    "rotary": products.rotary,
    "attention": attention.attention,
    "kv_append": attention.kv_append,
    "paged_attention": attention.paged_attention,
    "expert_linear": experts.expert_linear,
    "qexpert_linear": experts.qexpert_linear,
}
