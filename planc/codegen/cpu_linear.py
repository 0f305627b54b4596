"""CPU kernel rows of weights: linear layers, experts, embeddings, in f32, bf16 or codes; and rows rounded to 8 bits."""

from math import prod

from planc.codegen.cpu_elementwise import gated
from planc.codegen.kernel import Constant, Design, Row, Types, alias, flag, integer
from planc.compiler.ir.graph import Node
from planc.compiler.ir.operands import Operands, operands
from planc.compiler.ir.packing import BLOCK
from planc.compiler.ir.quant import Scheme, scheme
from planc.compiler.ir.types import PACKED, TensorType

_PLAIN = {"f32": "PackedF32", "bf16": "PackedBf16"}
ELEMENTS = {"f32": "float", "bf16": "uint16_t", "i8": "int8_t", "f8e4m3": "planc::F8"}


def _scheme(node: Node) -> Scheme | None:
    name = node.attr("scheme", "")
    return scheme(str(name)) if name else None


def _format(node: Node, w: TensorType) -> tuple[str, str] | None:
    """What weights.h calls the weight, and the tag of that; None when no kernel reads it."""
    row = _scheme(node)
    if row is None:
        return (_PLAIN[w.dtype], w.dtype) if w.dtype in _PLAIN else None
    if row.codes != "f8e4m3" and row.group and int(w.shape[-1]) % row.group:
        return None
    return _format_of_codes(row)


def _format_of_codes(row: Scheme) -> tuple[str, str] | None:
    group = row.group or 0
    if row.codes == "i8" and not group:
        return {None: ("PackedI8", "i8"), "i8": ("DotsI8", "i8i8")}.get(row.act)
    if row.codes == "i8" and not row.act:
        return f"GroupedI8<{group}>", f"i8g{group}"
    if row.codes == "f8e4m3" and row.act == "f8e4m3":
        return f"PackedF8<{group}>", f"f8g{group}"
    if row.codes != "u4" or not group:
        return None
    if row.act:
        return (f"DotsU4<{group}>", f"u4i8g{group}") if row.act == "i8" and row.by_group and row.zeros else None
    if row.name == "mxfp4":
        return f"E2m1<{group}>", f"e2m1g{group}"
    if row.zeros:
        return (
            (f"ZerosU4<{group}>", f"u4zerosg{group}")
            if row.whole
            else (f"FractionsU4<{group}>", f"u4fractionsg{group}")
        )
    return f"OffsetU4<{group}, {row.offset}>", f"u4less{row.offset}g{group}"


def _is_of_experts(node: Node) -> bool:
    return node.op.endswith("expert_linear")


def _places(node: Node) -> Operands[int]:
    """Which input is what; the one part of a plain weight is itself."""
    places = range(len(node.inputs))
    if _scheme(node):
        return operands(dict(node.attrs), places, _is_of_experts(node))
    x, *ids, w = places[: 2 + _is_of_experts(node)]
    return Operands(x, None, ids[0] if ids else None, (w,), tuple(places[w + 1 :]))


def _buffers(node: Node) -> dict[str, int | None]:
    """Which buffer a template finds things in, None where the node has none."""
    at = _places(node)
    q, s, z = (*at.parts, None, None)[:3]
    out = len(node.inputs)
    return {"row_scales": at.row_scales, "ids": at.ids, "q": q, "s": s, "z": z, "bias": at.bias, "out": out}


def _scale(types: Types, at: int | None) -> tuple[Constant, ...]:
    """What scales and zero points are, where they are no f32."""
    dtype = "f32" if at is None else types[at].dtype
    return () if dtype == "f32" else (alias("Scale", ELEMENTS[dtype], f"scales{dtype}"),)


def _element(types: Types, at: int | None) -> str:
    return ELEMENTS["f32" if at is None else types[at].dtype]


def _weight(node: Node, types: Types) -> TensorType:
    return types[_places(node).parts[0]]


def _fits(node: Node, types: Types) -> bool:
    """x is what the weight multiplies, and a kernel reads the weight."""
    row = _scheme(node)
    wanted = (row.act if row else None) or "f32"
    return types[0].dtype == wanted and _format(node, _weight(node, types)) is not None


def _linear_fits(node: Node, types: Types) -> bool:
    return _fits(node, types) and _one_stride(types[0])


def _row_stride(t: TensorType) -> int:
    """Elements between neighbouring vectors along the last axis, all leading axes taken as one."""
    return t.strides()[-2] if len(t.shape) > 1 else 0


def _one_stride(t: TensorType) -> bool:
    """True when the leading axes of a view can be walked as one."""
    strides = t.strides()[:-1]
    return all(a == b * int(d) for a, b, d in zip(strides, strides[1:], t.shape[1:-1], strict=False))


def _format_alias(node: Node, w: TensorType) -> Constant:
    named = _format(node, w)
    assert named is not None
    return alias("Format", f"planc::{named[0]}", named[1])


def _gated_fits(node: Node, types: Types) -> bool:
    """Halves of columns begin with a block of the packed weight."""
    return _linear_fits(node, types) and int(_weight(node, types).shape[0]) % (2 * BLOCK) == 0


def _linear(node: Node, types: Types) -> Design:
    x, w = types[0], _weight(node, types)
    n, k = (int(d) for d in w.shape)
    act = node.attr("act", "")
    at = _buffers(node)
    constants = (
        *([alias("Gate", gated(node), str(act))] if act else []),
        _format_alias(node, w),
        *_scale(types, at["s"]),
        integer("N", n),
        integer("K", k),
        integer("X_STRIDE", _row_stride(x)),
        integer("INNER", prod(int(d) for d in x.shape[1:-1])),
        flag("BIAS", _places(node).bias is not None),
    )
    return Design(constants, {"at": at, "scale": _element(types, at["s"]), "gated": bool(act)})


def _expert_linear(node: Node, types: Types) -> Design:
    at = _places(node)
    assert at.ids is not None
    x, ids, w = types[0], types[at.ids], _weight(node, types)
    experts, n, k = (int(d) for d in w.shape)
    buffers = _buffers(node)
    constants = (
        _format_alias(node, w),
        *_scale(types, buffers["s"]),
        integer("EXPERTS", experts),
        integer("N", n),
        integer("K", k),
        integer("SLOTS", int(ids.shape[-1])),
        integer("X_ROW", x.strides()[0]),
        integer("X_SLOT", x.strides()[1] if len(x.shape) == 3 else 0),
        integer("IDS_ROW", ids.strides()[0] if len(ids.shape) == 2 else 0),
        flag("BIAS", at.bias is not None),
        *(_scale_strides(types[at.row_scales], len(x.shape) - 1) if at.row_scales else ()),
    )
    return Design(constants, {"at": buffers, "scale": _element(types, buffers["s"])})


def _scale_strides(scales: TensorType, rows: int) -> tuple[Constant, ...]:
    """Of the scales of rows that have so many axes."""
    each = prod(int(d) for d in scales.shape[rows:])
    of_token = each * int(scales.shape[1]) if rows == 2 else each
    return integer("SCALE_ROW", of_token), integer("SCALE_SLOT", each * (rows == 2))


def _embedding_fits(node: Node, types: Types) -> bool:
    table = types[0]
    return types[-1].dtype == "i32" and table.dtype in ELEMENTS and _table(node, table) is not None


def _packed_embedding_fits(node: Node, types: Types) -> bool:
    return types[-1].dtype == "i32" and types[0].dtype == "u4" and _table(node, types[0]) is not None


def _table(node: Node, table: TensorType) -> tuple[str, str] | None:
    """The reader of a table, and the tag of that."""
    named, row = _format(node, table), _scheme(node)
    if named is None:
        return None
    if table.layout in PACKED:
        return f"PackedTable<Config, planc::{named[0]}>", named[1]
    return f"RowMajorTable<Config, {ELEMENTS.get(table.dtype)}, {(row and row.group) or 0}>", named[1]


def _embedding(node: Node, types: Types) -> Design:
    table, row = types[0], _scheme(node)
    reader = _table(node, table)
    assert reader is not None
    at = {"s": 1 if row else None, "z": 2 if row and row.zeros else None, "ids": len(types) - 1, "out": len(types)}
    constants = (integer("COUNT", int(table.shape[0])), integer("WIDTH", table.features))
    scale = _element(types, at["s"])
    tags = (reader[1], table.layout, *(["scalesbf16"] if scale != ELEMENTS["f32"] else []))
    return Design(constants, {"table": f"planc::{reader[0]}", "at": at, "scale": scale}, tags)


def _product_row(op: str, x: str, weights: str, packed: int) -> Row:
    """`packed` is where the weight comes among the inputs."""
    experts, gates = op.endswith("expert_linear"), op.endswith("act_mul")
    shape = "[T, K] or [T, k, K], ids i32[T, k] or [k]" if experts else "[.., K] (dense or rows at one stride)"
    fits = _fits if experts else _gated_fits if gates else _linear_fits
    return Row(
        op,
        "expert_linear.cpp.jinja" if experts else "linear.cpp.jinja",
        _expert_linear if experts else _linear,
        f"x {x}{shape}, W {weights} packed, bias f32",
        lambda node, types: _places(node).parts[0] == packed and fits(node, types),
        packed=frozenset({packed}),
        views=frozenset({0, packed - 1}) if experts else frozenset({0}),
    )


def _embedding_row(op: str, table: str) -> Row:
    says = f"table {table} row-major or packed, ids i32[T]"
    return Row(op, "embedding.cpp.jinja", _embedding, says, _embedding_fits, either=frozenset({0}))


_CODES = "i8 or f8e4m3 with a scale a row, or i8 with one a group"
_OF_CODES = "of the same codes, or u4"
_HALVES = f"whose halves have a multiple of {BLOCK} channels"
_U4_TABLE = "table u4 packed with scales by group, ids i32[T]"

LINEAR: tuple[Row, ...] = (
    _product_row("linear", "f32", "f32 or bf16", 1),
    _product_row("qlinear", "f32", "i8 with scales by channel or group, or u4 with scales by group", 1),
    _product_row("qlinear", _CODES, _OF_CODES, 2),
    _product_row("linear_act_mul", "f32", f"f32 or bf16 {_HALVES}", 1),
    _product_row("qlinear_act_mul", "f32", f"i8 or u4 {_HALVES}", 1),
    _product_row("qlinear_act_mul", _CODES, f"{_OF_CODES} {_HALVES}", 2),
    _product_row("expert_linear", "f32", "f32 or bf16", 2),
    _product_row("qexpert_linear", "f32", "i8 with scales by channel or group, or u4 with scales by group", 2),
    _product_row("qexpert_linear", _CODES, _OF_CODES, 3),
    _embedding_row("embedding", "f32 or bf16"),
    _embedding_row("qembedding", "i8 or f8e4m3 with scales"),
    Row("qembedding", "embedding.cpp.jinja", _embedding, _U4_TABLE, _packed_embedding_fits, packed=frozenset({0})),
)
