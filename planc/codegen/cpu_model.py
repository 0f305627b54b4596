"""CPU kernel rows of the model ops: norms, rotary, the KV cache and attention."""

from collections.abc import Callable

from planc.codegen.axes import outer
from planc.codegen.kernel import Constant, Design, Row, Types, alias, flag, integer, real
from planc.compiler.ir.graph import Node
from planc.compiler.ir.types import TensorType

Fits = Callable[[Node, Types], bool]
_CACHE = "f32 [T, heads, D] and a cache of f32 or bf16 whose block size is a multiple of 16"
_SCALED_CACHE = "f32 [T, heads, D] and a cache of i8 or f8e3m4 with scales, whose block size is a multiple of 16"
_CACHE_ELEMENTS = {"f32": "float", "bf16": "uint16_t", "i8": "int8_t", "f8e3m4": "planc::F8E3M4"}
_PARTS = ("k_offset", "v_offset")
_SCALED_PARTS = (*_PARTS, "k_scale_offset", "v_scale_offset")


def _num(node: Node, name: str) -> int:
    value = node.attr(name)
    assert isinstance(value, int)
    return value


def _real(node: Node, name: str) -> float:
    value = node.attr(name)
    assert isinstance(value, int | float)
    return float(value)


def _has(node: Node, name: str) -> bool:
    return bool(node.attr(name, False))


def norm_fits(node: Node, types: Types) -> bool:
    return all(t.dtype == "f32" for t in types)


def norm(node: Node, types: Types) -> Design:
    """The design of norm.cpp.jinja: the places of the inputs among the buffers, then those of the outputs."""
    added, layer = node.op.startswith("add_"), node.op.endswith("layer_norm")
    sides = 2 if added else 1
    bias = layer and _has(node, "bias")
    weight = len(types) - sides - bias == 1
    axes = outer(node.out.type, types[:sides])
    constants = (
        integer("WIDTH", int(node.out.type.shape[-1])),
        real("EPS", _real(node, "eps")),
        flag("WEIGHT", weight),
        *([flag("BIAS", bias)] if layer else []),
    )
    variables = {"extent": axes.extent, "out": axes.out, "inputs": axes.inputs, "added": added, "rounding": None}
    variables |= {"weight": sides if weight else None, "bias": sides + weight if bias else None}
    variables |= {"norm": "LayerNorm" if layer else "RmsNorm", "to": len(types), "total": len(types) + 1}
    return Design(constants, variables, (axes.tag,))


def _rotary(node: Node, types: Types) -> Design:
    x, cos = types[0], types[1]
    row, head, _ = x.strides()
    constants = (
        integer("HEADS", int(x.shape[1])),
        integer("WIDTH", int(x.shape[2])),
        integer("HALF", int(cos.shape[1])),
        integer("X_ROW", row),
        integer("X_HEAD", head),
        flag("INTERLEAVED", _has(node, "interleaved")),
    )
    return Design(constants)


def _cache_fits(node: Node, types: Types) -> bool:
    return node.attr("dtype") in ("f32", "bf16") and _num(node, "block") % 16 == 0


def _scaled_cache_fits(node: Node, types: Types) -> bool:
    return node.attr("dtype") in ("i8", "f8e3m4") and _num(node, "block") % 16 == 0


def _scaled(node: Node) -> bool:
    return bool(dict(node.attrs).get("k_scale_offset") is not None)


def _cache(node: Node) -> tuple[Constant, ...]:
    dtype = str(node.attr("dtype"))
    return (
        alias("Element", _CACHE_ELEMENTS[dtype], dtype),
        integer("KV_HEADS", _num(node, "heads")),
        integer("K_DIM", _num(node, "k_dim")),
        integer("V_DIM", _num(node, "v_dim")),
        integer("BLOCK_SIZE", _num(node, "block")),
        integer("PAGE_BYTES", _num(node, "page_bytes")),
    )


def _kv_append(node: Node, types: Types) -> Design:
    return Design((*_cache(node), *_key_strides(types[0], types[1])), {"scaled": _scaled(node)})


def _key_strides(k: TensorType, v: TensorType) -> tuple[Constant, ...]:
    (k_row, k_head, _), (v_row, v_head, _) = k.strides(), v.strides()
    strides = (("KEY_ROW", k_row), ("KEY_HEAD", k_head), ("VALUE_ROW", v_row), ("VALUE_HEAD", v_head))
    return tuple(integer(n, v) for n, v in strides)


def _rotary_append(node: Node, types: Types) -> Design:
    q, k, v, *angles, _, _ = types
    turn = _rotary(node, [q, *angles])
    return Design((*turn.constants, *_cache(node), *_key_strides(k, v)), {"scaled": _scaled(node)})


def _attention(node: Node, types: Types) -> Design:
    row, head, _ = types[0].strides()
    kind = str(node.attr("kind"))
    constants = (
        *_cache(node),
        integer("HEADS", int(types[0].shape[1])),
        integer("Q_ROW", row),
        integer("Q_HEAD", head),
        real("SCALE", _real(node, "scale")),
        real("SOFTCAP", _real(node, "softcap")),
        Constant(f"static constexpr planc::MaskKind MASK = planc::MaskKind::{kind.upper()}", kind),
        *([integer("WINDOW", _num(node, "window"))] if kind != "causal" else []),
        flag("SINKS", _has(node, "sinks")),
        flag("ALIBI", _has(node, "alibi")),
    )
    return Design(constants, {name: _has(node, name) for name in ("sinks", "alibi")} | {"scaled": _scaled(node)})


def _norm_row(op: str, views: int) -> Row:
    says = "f32 [T, .., D], weight and bias f32[D]"
    return Row(op, "norm.cpp.jinja", norm, says, norm_fits, views=frozenset(range(views)))


def _append_row(says: str, fits: Fits, parts: tuple[str, ...]) -> Row:
    views, places = frozenset({0, 1}), {3: parts}
    return Row("kv_append", "kv_append.cpp.jinja", _kv_append, says, fits, views=views, places=places)


def _rotary_append_row(says: str, fits: Fits, parts: tuple[str, ...]) -> Row:
    views, places = frozenset({0, 1, 2}), {7: parts}
    return Row("rotary_append", "rotary_append.cpp.jinja", _rotary_append, says, fits, views=views, places=places)


def _attention_row(says: str, fits: Fits, parts: tuple[str, ...]) -> Row:
    views, places = frozenset({0}), {1: parts}
    return Row("paged_attention", "paged_attention.cpp.jinja", _attention, says, fits, views=views, places=places)


MODEL: tuple[Row, ...] = (
    _norm_row("rms_norm", 1),
    _norm_row("layer_norm", 1),
    _norm_row("add_rms_norm", 2),
    _norm_row("add_layer_norm", 2),
    Row("rotary", "rotary.cpp.jinja", _rotary, "x f32[T, heads, D], tables f32[positions, R/2]", views=frozenset({0})),
    _append_row(_CACHE, _cache_fits, _PARTS),
    _append_row(_SCALED_CACHE, _scaled_cache_fits, _SCALED_PARTS),
    _rotary_append_row(_CACHE, _cache_fits, _PARTS),
    _rotary_append_row(_SCALED_CACHE, _scaled_cache_fits, _SCALED_PARTS),
    _attention_row(_CACHE, _cache_fits, _PARTS),
    _attention_row(_SCALED_CACHE, _scaled_cache_fits, _SCALED_PARTS),
)
