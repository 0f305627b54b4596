"""CUDA kernel rows of vectors: norms, rotary, tables, rows to 8 bits, and ops along the last axis."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod

from planc.codegen.axes import outer
from planc.codegen.cuda.call import (
    Call,
    Constant,
    Ref,
    Row,
    Site,
    cdiv,
    i32,
    kernel,
    pointer,
    power_of_two,
    scratch,
    value,
)
from planc.codegen.cuda.dense_tiles import vector_warps
from planc.compiler.ir import hadamard, rounded
from planc.compiler.ir.graph import Node
from planc.compiler.ir.operands import rounding
from planc.compiler.ir.quant import LIMITS, scheme
from planc.compiler.ir.types import PAIRS, TensorType

_TILE = 1024  # elements of a program, where a vector has fewer
_STEP = 4096  # elements of a vector at a time, where it need not be whole
_WHOLE = 65536  # elements of a vector that a program holds
_TWICE = 16384  # of one that is made and rounded, before registers spill
_FLOATS = frozenset({"f32", "bf16", "f16"})
_NO_FP8 = (80, 86)
_TURN = 4096  # elements that a program turns
_TURNED = "turned"  # the buffer that holds them


class _Vectors:
    """A kernel over the vectors of a node, as it is gathered: its arguments in order, and where each vector lies."""

    def __init__(self, site: Site, sides: Mapping[str, int], block: int = _TILE) -> None:
        """`sides` names the inputs that are walked along the output's outer axes, `block` elements at a time."""
        self.site = site
        inputs = [site.inputs[i] for i in sides.values()]
        axes = outer(site.out, inputs)
        keep = [i for i, n in enumerate(axes.extent) if n > 1]
        self.inner = prod(axes.extent)
        self.count = site.bucket.size(site.out.shape[0]) * self.inner
        self.block = block
        self.rows = max(1, _TILE // block)
        self.types: dict[str, str] = {}
        self.refs: list[Ref] = []
        self.aligned: set[str] = set()
        self.constants: dict[str, Constant] = {"EXTENT": tuple(axes.extent[i] for i in keep), "INNER": self.inner}
        for name, side in zip(sides, axes.inputs, strict=True):
            self.constants[name] = (side[0], *(side[1 + i] for i in keep))

    def input(self, name: str, index: int | None) -> None:
        """A pointer to an input, or None where the node has none."""
        if index is None:
            self.constants[name] = None
            return
        given = self.site.node.inputs[index]
        self.types[name] = pointer(self.site.inputs[index].dtype)
        self.refs.append(value(given))
        if self.site.is_aligned(given):
            self.aligned.add(name)

    def output(self, name: str, index: int = 0) -> None:
        made = self.site.node.outputs[index]
        self.types[name] = pointer(made.type.dtype)
        self.refs.append(value(made.name))
        if self.site.is_aligned(made.name):
            self.aligned.add(name)

    def scratch(self, name: str, buffer: str) -> None:
        """A pointer to a buffer of the node."""
        self.types[name] = pointer("f32")
        self.refs.append(scratch(buffer))
        self.aligned.add(name)

    def bucket(self, name: str, number: int) -> None:
        """A number that depends on the bucket, and so takes no part in what the kernel is."""
        self.types[name] = "i32"
        self.refs.append(i32(number))

    def number(self, name: str, number: int) -> None:
        """A number that depends on the node; one that 16 divides allows wide accesses."""
        self.bucket(name, number)
        if number % 16 == 0:
            self.aligned.add(name)

    def launch(self, source: str, function: str, blocks: int = 1) -> tuple[Call, ...]:
        """The call; `blocks` programs take the parts of a vector."""
        self.constants |= {"ROWS": self.rows, "BLOCK": self.block}
        grid = (cdiv(self.count, self.rows), blocks, 1)
        return (self.call(source, function, grid, vector_warps(self.block * self.rows)),)

    def call(self, source: str, function: str, grid: tuple[int, int, int], warps: int) -> Call:
        node, aligned = self.site.node, frozenset(self.aligned)
        made = kernel(source, function, self.types, self.constants, aligned=aligned, num_warps=warps)
        read = (r for r in self.refs if r.kind == "scratch" or r.value in node.inputs)
        reads = tuple(dict.fromkeys(str(r.value) for r in read))
        return Call(made, grid, tuple(self.refs), reads, tuple(v.name for v in node.outputs))


def _width(site: Site) -> int:
    return int(site.inputs[0].shape[-1])


def _norm(site: Site) -> tuple[Call, ...]:
    p = _normed(site, site.node, len(site.inputs))
    p.output("y_ptr")
    if len(site.node.outputs) > 1:
        p.output("sum_ptr", 1)
    p.bucket("vectors", p.count)
    return p.launch("norm", "norm")


def _normed(site: Site, node: Node, count: int) -> _Vectors:
    """What a norm reads, which are the first `count` inputs."""
    added, layer = node.op.startswith("add_"), node.op.endswith("layer_norm")
    bias = layer and site.flag("bias")
    first = 2 if added else 1
    weight = count - first - bias == 1
    p = _Vectors(site, {"X": 0, "ADDED": 1} if added else {"X": 0}, power_of_two(_width(site)))
    p.input("x_ptr", 0)
    p.input("added_ptr", 1 if added else None)
    p.input("weight_ptr", first if weight else None)
    p.input("bias_ptr", first + weight if bias else None)
    p.constants |= {"LAYER": layer, "EPS": float(site.number("eps")), "WIDTH": _width(site)}
    p.constants |= {} if added else {"sum_ptr": None, "ADDED": None}
    return p


def _norm_quantize(site: Site) -> tuple[Call, ...]:
    first, shift, outliers = _both(site)
    p = _normed(site, first, len(first.inputs))
    p.input("shift_ptr", shift)
    _codes(p, outliers)
    return p.launch("rounded", "norm_quantize")


def _act_mul_quantize(site: Site) -> tuple[Call, ...]:
    first, shift, outliers = _both(site)
    if site.number("hadamard", 1) > 1:
        return _turned_rows(site, shift, {"X": 0, "UP": 1}, str(first.attr("act")))
    p = _Vectors(site, {"GATE": 0, "UP": 1}, power_of_two(_width(site)))
    p.input("gate_ptr", 0)
    p.input("up_ptr", 1)
    p.input("shift_ptr", shift)
    _codes(p, outliers)
    p.constants["ACT"] = str(first.attr("act"))
    return p.launch("rounded", "act_mul_quantize")


def _both(site: Site) -> tuple[Node, int | None, int | None]:
    """What makes the rows that are rounded, and which inputs are the shift and the outliers of these."""
    first, _ = rounded.pair(site.node, site.inputs)
    count = len(first.inputs)
    _, shift, outliers = rounding(range(count - 1, len(site.inputs)), [first.out.type, *site.inputs[count:]])
    return first, shift, outliers


def _quantize_rows(site: Site) -> tuple[Call, ...]:
    _, shift, outliers = rounding(range(len(site.inputs)), site.inputs)
    if site.number("hadamard", 1) > 1:
        return _turned_rows(site, shift, {"X": 0})
    p = _Vectors(site, {"X": 0}, power_of_two(_width(site)))
    p.input("x_ptr", 0)
    p.input("shift_ptr", shift)
    _codes(p, outliers)
    return p.launch("quantize", "quantize_rows")


def _turned_rows(site: Site, shift: int | None, sides: Mapping[str, int], act: str | None = None) -> tuple[Call, ...]:
    """Rounds rows that are turned into a scratch buffer before; `sides` says what they are made of."""
    p = _Vectors(site, {}, power_of_two(_width(site)))
    p.scratch("x_ptr", _TURNED)
    p.input("shift_ptr", None)
    p.constants |= {"EXTENT": (), "INNER": 1, "X": (_width(site),)}
    _codes(p, None)
    return (_rotate(site, shift, sides, act), *p.launch("quantize", "quantize_rows"))


def _codes(p: _Vectors, outliers: int | None) -> None:
    """The rest of what writes codes: outliers, the last two outputs, and what they say."""
    site = p.site
    dtype, count = str(site.node.attr("dtype")), 0 if outliers is None else int(site.inputs[outliers].shape[0])
    p.input("outliers_ptr", outliers)
    last = len(site.node.outputs) - 2
    if last:
        p.output("sum_ptr")
    p.output("codes_ptr", last)
    p.output("scales_ptr", last + 1)
    p.bucket("vectors", p.count)
    p.constants |= {"LIMIT": float(LIMITS[dtype]), "WHOLE": dtype == "i8", "WIDTH": _width(site)}
    p.constants |= {"OUTLIERS": count, "PICKED": power_of_two(count)}


def _rotate(site: Site, shift: int | None, sides: Mapping[str, int], act: str | None) -> Call:
    """Turns the rows, in blocks, into a scratch buffer: a program has some columns of a vector's blocks."""
    size = int(site.number("hadamard"))
    count = _width(site) // size
    columns = min(power_of_two(count), max(1, _TURN // size))
    p = _Vectors(site, sides, size * columns)
    p.input("x_ptr", 0)
    p.input("up_ptr", sides.get("UP"))
    p.input("shift_ptr", shift)
    p.scratch("turned_ptr", _TURNED)
    p.constants |= {"ACT": act, **({} if act else {"UP": None})}
    p.constants |= {"SIZE": size, "STAGES": size.bit_length() - 1, "COUNT": count, "COLUMNS": columns}
    p.constants |= {"SCALE": float(hadamard.scale(size)), "WORDS": tuple(map(_signed, hadamard.WORDS))}
    call = p.call("quantize", "rotate", (p.count, cdiv(count, columns), 1), vector_warps(size * columns))
    return replace(call, reads=site.node.inputs, writes=(_TURNED,), scratch={_TURNED: 4 * p.count * _width(site)})


def _signed(word: int) -> int:
    """The 32 bits of a word as a number of an int."""
    return word - (word >> 31 << 32)


def _along(site: Site) -> tuple[Call, ...]:
    """Reductions, softmax, running sums, argmax."""
    op = site.node.op
    p = _Vectors(site, {"X": 0}, min(_STEP, power_of_two(_width(site))))
    p.input("x_ptr", 0)
    p.output("y_ptr")
    p.bucket("vectors", p.count)
    p.constants |= {"WIDTH": _width(site)}
    if op in ("softmax", "cumsum", "argmax"):
        return p.launch("rowops", op)
    p.constants["OP"] = op
    return p.launch("rowops", "reduce")


def _topk(site: Site) -> tuple[Call, ...]:
    p = _Vectors(site, {"X": 0}, power_of_two(_width(site)))
    p.input("x_ptr", 0)
    p.output("values_ptr")
    p.output("index_ptr", 1)
    p.bucket("vectors", p.count)
    p.constants |= {"COUNT": int(site.number("k")), "LARGEST": site.flag("largest"), "WIDTH": _width(site)}
    return p.launch("rowops", "topk")


def _gather(site: Site) -> tuple[Call, ...]:
    count = int(site.inputs[1].shape[-1])
    p = _Vectors(site, {"X": 0, "INDEX": 1}, min(_TILE, power_of_two(count)))
    p.input("x_ptr", 0)
    p.input("index_ptr", 1)
    p.output("y_ptr")
    p.bucket("vectors", p.count)
    p.constants |= {"WIDTH": _width(site), "COUNT": count}
    return p.launch("rowops", "gather", cdiv(count, p.block))


def _scatter(site: Site) -> tuple[Call, ...]:
    source = len(site.inputs) == 3
    sides = {"X": 0, "INDEX": 1} | ({"SOURCE": 2} if source else {})
    p = _Vectors(site, sides, min(_TILE, power_of_two(_width(site))))
    p.input("x_ptr", 0)
    p.input("index_ptr", 1)
    p.input("source_ptr", 2 if source else None)
    p.output("y_ptr")
    p.bucket("vectors", p.count)
    p.constants |= {"VALUE": 0.0 if source else float(site.number("scalar")), "ADD": site.flag("add")}
    p.constants |= {"WIDTH": _width(site), "COUNT": int(site.inputs[1].shape[-1])}
    p.constants |= {"STEP": int(source and int(site.inputs[2].shape[-1]) > 1)}
    p.constants |= {} if source else {"SOURCE": None}
    return p.launch("rowops", "scatter", cdiv(_width(site), p.block))


def _embedding(site: Site) -> tuple[Call, ...]:
    name = str(site.node.attr("scheme", ""))
    row, table = scheme(name) if name else None, site.inputs[0]
    form = "float" if row is None else "e2m1" if row.name == "mxfp4" else "u4" if row.codes == "u4" else "code"
    width = table.features
    p = _Vectors(site, {})
    p.constants = {}
    p.input("table_ptr", 0)
    p.input("scales_ptr", 1 if row else None)
    p.input("zeros_ptr", 2 if row and row.zeros else None)
    p.input("ids_ptr", len(site.inputs) - 1)
    p.output("y_ptr")
    offset, group = (float(row.offset), row.group or 0) if row else (0.0, 0)
    block = min(_TILE, power_of_two(width))
    p.constants |= {"FORMAT": form, "OFFSET": offset, "GROUP": group, "COUNT": int(table.shape[0]), "WIDTH": width}
    p.constants["BLOCK"] = block
    grid = (site.bucket.size(site.out.shape[0]), cdiv(width, block), 1)
    return (p.call("embedding", "embedding", grid, 4),)


def _take_rows(site: Site) -> tuple[Call, ...]:
    x = site.inputs[0]
    block = min(_TILE, power_of_two(x.features))
    p = _Vectors(site, {})
    p.input("x_ptr", 0)
    p.input("index_ptr", 1)
    p.output("y_ptr")
    p.number("x_row", x.strides()[0])
    p.constants = {"WIDTH": x.features, "BLOCK": block}
    grid = (site.bucket.size(site.out.shape[0]), cdiv(x.features, block), 1)
    return (p.call("embedding", "take_rows", grid, 4),)


def turning(x: TensorType, table: TensorType) -> dict[str, int]:
    """Constants of kernels that turn x[T, heads, D] by a table [positions, R/2]: LINES heads a program."""
    half, heads, width = int(table.shape[1]), int(x.shape[1]), int(x.shape[2])
    pairs = power_of_two(half)
    lines = min(power_of_two(heads), max(1, _TILE // pairs))
    rest = power_of_two(width - 2 * half) if width > 2 * half else 0
    return {"HEADS": heads, "HALF": half, "LINES": lines, "PAIRS": pairs, "REST": rest}


def _rotary(site: Site) -> tuple[Call, ...]:
    x = site.inputs[0]
    constants = turning(x, site.inputs[1])
    p = _Vectors(site, {})
    for i, name in enumerate(("x_ptr", "cos_ptr", "sin_ptr", "positions_ptr")):
        p.input(name, i)
    p.output("y_ptr")
    p.number("x_row", x.strides()[0])
    p.number("x_head", x.strides()[1])
    p.constants = {**constants, "WIDTH": int(x.shape[2]), "INTERLEAVED": site.flag("interleaved")}
    groups = cdiv(constants["HEADS"], constants["LINES"])
    return (p.call("kv", "rotary", (site.bucket.size(site.out.shape[0]), groups, 1), 4),)


def _weighted_sum(site: Site) -> tuple[Call, ...]:
    y, w = site.inputs
    width = int(y.shape[2])
    block = min(_TILE, power_of_two(width))
    p = _Vectors(site, {})
    p.input("y_ptr", 0)
    p.input("w_ptr", 1)
    p.output("out_ptr")
    for name, number in (("y_row", y.strides()[0]), ("y_slot", y.strides()[1]), ("w_row", w.strides()[0])):
        p.number(name, number)
    p.number("width", width)
    p.constants = {"SLOTS": int(y.shape[1]), "BLOCK": block}
    grid = (site.bucket.size(site.out.shape[0]), cdiv(width, block), 1)
    return (p.call("experts", "weighted_sum", grid, 4),)


def _matmul(site: Site) -> tuple[Call, ...]:
    a, b, out = *site.inputs, site.out
    lead = out.shape[:-2]
    m = site.bucket.size(out.shape[-2])
    p = _Vectors(site, {})
    p.input("a_ptr", 0)
    p.input("b_ptr", 1)
    p.output("y_ptr")
    p.bucket("m", m)
    p.number("a_line", a.strides()[-2])
    p.number("b_line", b.strides()[-2])
    n, k = int(b.shape[-1]), int(a.shape[-1])
    bm = 16 if m <= 16 else 32
    p.constants = {"N": n, "K": k, "EXTENT": tuple(int(d) for d in lead[1:])}
    p.constants |= {"INNER": prod(int(d) for d in lead[1:]), "A": _lead(a, len(lead)), "B": _lead(b, len(lead))}
    p.constants |= {"BM": bm, "BN": 32, "BK": 32}
    batches = prod(site.bucket.size(d) for d in lead)
    return (p.call("rowops", "matmul", (batches, cdiv(m, bm), cdiv(n, 32)), 4),)


def _lead(t: TensorType, count: int) -> tuple[int, ...]:
    """Strides of a matrix's place in a batch of `count` axes, 0 where it is repeated."""
    own = [0 if d == 1 else s for d, s in zip(t.shape[:-2], t.strides(), strict=False)]
    return (0,) * (max(count, 1) - len(own)) + tuple(own)


def _strided(t: TensorType) -> bool:
    return t.layout == "row" or t.layout.startswith("strides:")


def _all_views(site: Site) -> bool:
    return all(_strided(t) for t in site.inputs) and all(v.type.layout == "row" for v in site.node.outputs)


def _floats_fit(site: Site) -> bool:
    return _all_views(site) and all(t.dtype in _FLOATS for t in site.inputs)


def _held(site: Site) -> bool:
    """Floats, in vectors that a program holds."""
    return _floats_fit(site) and _width(site) <= _WHOLE


def _norm_fits(site: Site) -> bool:
    parameters = site.inputs[2 if site.node.op.startswith("add_") else 1 :]
    return _held(site) and all(t.layout == "row" for t in parameters)


def _topk_fits(site: Site) -> bool:
    return _floats_fit(site) and _width(site) <= _WHOLE // 4


def _codes_fit(site: Site) -> bool:
    fits = _floats_fit_first(site, 1) and _width(site) <= _WHOLE and not site.number("group", 0)
    return fits and (site.node.attr("dtype") == "i8" or site.arch not in _NO_FP8)


def _norm_codes_fit(site: Site) -> bool:
    """A program holds a vector as it comes and as it is rounded, which does not turn between."""
    return site.number("hadamard", 1) == 1 and _width(site) <= _TWICE and _made_fits(site)


def _act_codes_fit(site: Site) -> bool:
    """Vectors that turn are gated as they do, in parts."""
    return (site.number("hadamard", 1) > 1 or _width(site) <= _TWICE) and _made_fits(site)


def _made_fits(site: Site) -> bool:
    floats = _floats_fit_first(site, len(_both(site)[0].inputs))
    return floats and all(t.layout == "row" for t in site.inputs[2:]) and _codes_fit(site)


def _index_fits(site: Site) -> bool:
    return _all_views(site) and site.inputs[1].dtype == "i32" and site.inputs[0].dtype in ("f32", "i32")


def _embedding_fits(site: Site) -> bool:
    table, ids = site.inputs[0], site.inputs[-1]
    name = str(site.node.attr("scheme", ""))
    if ids.dtype != "i32" or ids.layout != "row":
        return False
    if not name:
        return table.layout == "row" and table.dtype in ("f32", "bf16")
    if scheme(name).codes == "u4":
        return table.layout == PAIRS
    return table.layout == "row" and (table.dtype == "i8" or site.arch not in _NO_FP8)


def _take_rows_fits(site: Site) -> bool:
    x = site.inputs[0]
    dense = TensorType(x.dtype, x.shape).strides()
    return _all_views(site) and site.inputs[1].dtype == "i32" and x.strides()[1:] == dense[1:]


def _rotary_fits(site: Site) -> bool:
    return _floats_fit_first(site, 3) and site.inputs[3].dtype == "i32"


def _floats_fit_first(site: Site, count: int) -> bool:
    return _all_views(site) and all(t.dtype in _FLOATS for t in site.inputs[:count])


def _matmul_fits(site: Site) -> bool:
    return _all_views(site) and all(t.dtype == "f32" for t in site.inputs)


def _named(
    ops: Sequence[str], make: Callable[[Site], tuple[Call, ...]], says: str, when: Callable[[Site], bool]
) -> tuple[Row, ...]:
    return tuple(Row(op, make, says, when) for op in ops)


_NORMS = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")
_ALONG = ("sum", "mean", "amax", "amin", "prod", "softmax", "cumsum", "argmax")
_TABLE = "ids i32[T] and a table of f32 or bf16, of 8-bit codes (f8e4m3 from sm_89), or of u4 in pairs"
_MADE = f"floats [T, .., D], D up to {_TWICE} and, of norms, not turned, to i8 or (from sm_89) f8e4m3"
ROWS: tuple[Row, ...] = (
    *_named(_NORMS, _norm, f"floats [T, .., D], D up to {_WHOLE}, in any views", _norm_fits),
    *_named(tuple(map(rounded.name, _NORMS)), _norm_quantize, _MADE, _norm_codes_fit),
    Row(rounded.name("act_mul"), _act_mul_quantize, _MADE, _act_codes_fit),
    *_named(_ALONG, _along, "floats [T, .., D] in any views", _floats_fit),
    Row("quantize_rows", _quantize_rows, f"floats [.., K], K up to {_WHOLE}, to i8 or (from sm_89) f8e4m3", _codes_fit),
    Row("topk", _topk, f"floats [T, .., D], D up to {_WHOLE // 4}, in any views", _topk_fits),
    Row("gather", _gather, "f32 or i32 [T, .., D] and an index of i32, in any views", _index_fits),
    Row("scatter", _scatter, "f32 [T, .., D] and an index of i32, in any views", _index_fits),
    *_named(("embedding", "qembedding"), _embedding, _TABLE, _embedding_fits),
    Row("take_rows", _take_rows, "x[T, ..] with dense rows, index i32[R]", _take_rows_fits),
    Row("rotary", _rotary, "x of floats [T, heads, D], tables of floats [positions, R/2]", _rotary_fits),
    Row("weighted_sum", _weighted_sum, "floats [T, k, N] and [T, k], in any views", _floats_fit),
    Row("matmul", _matmul, "f32 [.., M, K] and [.., K, N], in any views", _matmul_fits),
)
