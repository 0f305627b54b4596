"""CUDA kernel rows of pointwise ops and moves: unary, binary, comparisons, casts, fused chains, copies."""

from collections.abc import Callable, Sequence
from math import prod

from planc.codegen.axes import Axes, elementwise, strided
from planc.codegen.cuda.call import Call, Constant, Row, Site, cdiv, i32, kernel, pointer, power_of_two, value
from planc.compiler.ir.fused import Arg, parse
from planc.compiler.ir.refs import ACTS, BINARY, COMPARE, UNARY
from planc.compiler.ir.types import TensorType

Code = tuple[Constant, ...]
_FLOATS = frozenset({"f32", "bf16", "f16"})
_ON_INTS = ("neg", "abs", "square", "sign", *(op for op in (*BINARY, *COMPARE) if op not in ("div", "pow")))
_NAMES = tuple(f"{c}_ptr" for c in "abcdefgh")
_TILE = 1024  # elements of a program
# Moves take elements by their size: none of them computes.
_MOVED = {1: "u8", 2: "bf16", 4: "i32", 8: "i64"}


def _launch(
    site: Site,
    code: Sequence[Code],
    axes: Axes,
    rows: int,
    sources: Sequence[int],
    dtypes: Sequence[str],
    offset: int = 0,
) -> Call:
    """A chain over the inputs `sources`, whose elements and those of the output have `dtypes`.

    The output begins `offset` bytes into its buffer.
    """
    node, out = site.node, site.node.out.name
    extent, sides = _trimmed(axes)
    width = prod(extent)
    block = min(_TILE, power_of_two(width))
    constants: dict[str, Constant] = {n: None for n in _NAMES[len(sources) :]}
    constants |= {"CODE": tuple(code), "INPUTS": sides[1:], "WIDTH": width, "EXTENT": extent, "OUT": sides[0]}
    constants |= {"ROWS": _TILE // block, "BLOCK": block}
    names = [node.inputs[i] for i in sources]
    types = {n: pointer(d) for n, d in zip((*_NAMES[: len(sources)], "out_ptr"), dtypes, strict=True)}
    aligned = {n for n, given in zip(_NAMES, names, strict=False) if site.is_aligned(given)}
    aligned |= {"out_ptr"} if offset % 16 == 0 and site.is_aligned(out) else set()
    made = kernel("elementwise", "pointwise", types | {"rows": "i32"}, constants, aligned=frozenset(aligned))
    args = (*map(value, names), value(out, offset), i32(rows))
    return Call(made, (cdiv(rows, _TILE // block), cdiv(width, block), 1), args, tuple(dict.fromkeys(names)), (out,))


def _trimmed(axes: Axes) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Extents and sides without leading axes of one element."""
    drop = next((i for i, n in enumerate(axes.extent) if n > 1), len(axes.extent) - 1)
    return axes.extent[drop:], tuple((side[0], *side[1 + drop :]) for side in (axes.out, *axes.inputs))


def _chain(site: Site, *code: Code) -> tuple[Call, ...]:
    axes = elementwise(site.out, site.inputs)
    dtypes = [t.dtype for t in (*site.inputs, site.out)]
    return (_launch(site, code, axes, _rows(site), range(len(site.inputs)), dtypes),)


def _rows(site: Site) -> int:
    return site.bucket.size(site.out.shape[0])


def _v(index: int) -> Constant:
    return ("v", index)


def _unary(site: Site) -> tuple[Call, ...]:
    return _chain(site, (site.node.op, _v(0)))


def _gelu(site: Site) -> tuple[Call, ...]:
    return _chain(site, ("gelu_tanh" if site.flag("tanh") else "gelu", _v(0)))


def _act_mul(site: Site) -> tuple[Call, ...]:
    return _chain(site, (str(site.node.attr("act")), _v(0)), ("mul", _v(2), _v(1)))


def _binary(site: Site) -> tuple[Call, ...]:
    if len(site.inputs) == 2:
        return _chain(site, (site.node.op, _v(0), _v(1)))
    scalar = site.number("scalar")
    number = int(scalar) if site.inputs[0].dtype == "i32" else float(scalar)
    return _chain(site, _statement(site.node.op, [_v(0), ("c", number)], site.flag("reversed")))


def _statement(op: str, args: Sequence[Constant], swapped: bool = False) -> Code:
    """A call of a pointwise function; a power that a few products make is one of its own."""
    last = args[-1]
    if op == "pow" and not swapped and isinstance(last, tuple) and last[0] == "c" and last[1] in (2.0, 3.0, 4.0):
        return (f"power{last[1]:.0f}", args[0])
    return (op, *(args[::-1] if swapped else args))


def _where(site: Site) -> tuple[Call, ...]:
    return _chain(site, ("where", _v(0), _v(1), _v(2)))


def _cast(site: Site) -> tuple[Call, ...]:
    return _chain(site, ("copy", _v(0)))


def _fused(site: Site) -> tuple[Call, ...]:
    count = len(site.inputs)

    def argument(arg: Arg) -> Constant:
        if isinstance(arg, float):
            return ("c", arg)
        return _v(int(arg[1:]) + (count if arg[0] == "t" else 0))

    code = (_statement(s.op, [argument(a) for a in s.args]) for s in parse(str(site.node.attr("code"))))
    return _chain(site, *code)


def _copy(site: Site) -> tuple[Call, ...]:
    return (_move(site, elementwise(site.out, site.inputs), _rows(site), 0),)


def _move(site: Site, axes: Axes, rows: int, source: int, offset: int = 0) -> Call:
    moved = _MOVED[site.out.itemsize]
    return _launch(site, (("copy", _v(0)),), axes, rows, (source,), (moved, moved), offset)


def _transpose(site: Site) -> tuple[Call, ...]:
    perm, strides, out = site.node.attr("perm"), site.inputs[0].strides(), site.out
    assert isinstance(perm, tuple)
    axes = strided([int(d) for d in out.shape[1:]], out.strides(), [strides[p] for p in perm])
    return (_move(site, axes, _rows(site), 0),)


def _concat(site: Site) -> tuple[Call, ...]:
    """One move a part, to its place: beside each other, or below when the first axis has a known length."""
    axis, out = int(site.number("axis")), site.out
    strides, at, made = out.strides(), 0, []
    for i, t in enumerate(site.inputs):
        axes = strided([int(d) for d in t.shape[1:]], strides, t.strides())
        rows = site.bucket.size(t.shape[0])
        made.append(_move(site, axes, rows, i, at * strides[axis] * out.itemsize))
        at += int(t.shape[axis])
    return tuple(made)


def _strided(t: TensorType) -> bool:
    return t.layout == "row" or t.layout.startswith("strides:")


def _views(site: Site) -> bool:
    return bool(site.out.shape) and all(_strided(t) for t in site.inputs)


def _fits(site: Site) -> bool:
    dtypes = {t.dtype for t in site.inputs}
    whole = dtypes == {"i32"} and site.node.op in _ON_INTS and _whole(site)
    return _views(site) and len(site.inputs) <= len(_NAMES) and (dtypes <= _FLOATS or whole)


def _whole(site: Site) -> bool:
    """Whether the scalar, if there is one, is exact as an int of 32 bits."""
    scalar = float(site.number("scalar", 0.0))
    return scalar.is_integer() and -(2**31) <= scalar < 2**31


def _where_fits(site: Site) -> bool:
    values = {t.dtype for t in site.inputs[1:]}
    return _views(site) and site.inputs[0].dtype in _FLOATS and (values <= _FLOATS or values == {"i32"})


def _cast_fits(site: Site) -> bool:
    known = _FLOATS | {"i32"}
    return _views(site) and site.inputs[0].dtype in known and site.out.dtype in known


def _act_fits(site: Site) -> bool:
    return _fits(site) and site.node.attr("act") in ACTS


def _row(op: str, make: Callable[[Site], tuple[Call, ...]], says: str, when: Callable[[Site], bool] = _fits) -> Row:
    return Row(op, make, says + ", in any views", when)


def _says(op: str) -> str:
    return "floats or i32" if op in _ON_INTS else "floats"


_ANY = "elements of any kind"
POINTWISE: tuple[Row, ...] = (
    *(_row(op, _unary, _says(op)) for op in UNARY),
    *(_row(op, _binary, _says(op)) for op in (*BINARY, *COMPARE)),
    _row("gelu", _gelu, "floats"),
    _row("act_mul", _act_mul, "floats", _act_fits),
    _row("fused", _fused, "up to eight inputs of floats"),
    _row("where", _where, "a condition of floats, values of floats or i32", _where_fits),
    _row("cast", _cast, "between floats and i32", _cast_fits),
    _row("copy", _copy, _ANY, _views),
    _row("expand", _copy, _ANY, _views),
    _row("transpose", _transpose, _ANY, _views),
    _row("concat", _concat, _ANY, _views),
)
