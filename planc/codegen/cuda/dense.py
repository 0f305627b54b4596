"""CUDA kernel rows of weights: linear layers and experts, in f32, bf16 or codes."""

from collections.abc import Mapping
from math import prod

from planc.codegen.cuda.call import (
    Call,
    Constant,
    Ref,
    Row,
    Site,
    TritonKernel,
    cdiv,
    i32,
    kernel,
    pointer,
    scratch,
    value,
)
from planc.codegen.cuda.dense_tiles import BAND
from planc.codegen.cuda.tiles import Choice
from planc.compiler.ir.operands import Operands, operands
from planc.compiler.ir.quant import Scheme, scheme
from planc.compiler.ir.types import PAIRS, TensorType
from planc.plans.tuning import Product, Tile

_NO_FP8 = (80, 86)  # archs without products of fp8


def _scheme(site: Site) -> Scheme | None:
    name = str(site.node.attr("scheme", ""))
    return scheme(name) if name else None


def _of_experts(site: Site) -> bool:
    return site.node.op.endswith("expert_linear")


def _places(site: Site) -> Operands[int]:
    """Which input is what; the one part of a plain weight is itself."""
    places = range(len(site.inputs))
    if _scheme(site):
        return operands(dict(site.node.attrs), places, _of_experts(site))
    x, *ids, w = places[: 2 + _of_experts(site)]
    return Operands(x, None, ids[0] if ids else None, (w,), tuple(places[w + 1 :]))


def _weight(site: Site) -> TensorType:
    return site.inputs[_places(site).parts[0]]


def _one_stride(t: TensorType) -> bool:
    """True when the leading axes of a view can be walked as one."""
    if not _is_strided(t):
        return False
    strides = t.strides()[:-1]
    return all(a == b * int(d) for a, b, d in zip(strides, strides[1:], t.shape[1:-1], strict=False))


def _is_strided(t: TensorType) -> bool:
    return t.layout == "row" or t.layout.startswith("strides:")


def _fits(site: Site) -> bool:
    at = _places(site)
    others = [i for i in range(len(site.inputs)) if i not in (at.x, at.ids, at.parts[0])]
    if any(site.inputs[i].layout != "row" for i in others):
        return False
    grouped = at.parts[1:] if _weight(site).dtype == "u4" else ()  # whose scales may be bf16
    if any(site.inputs[i].dtype != "f32" and not (i in grouped and site.inputs[i].dtype == "bf16") for i in others):
        return False
    if at.ids is None:
        return _one_stride(site.inputs[at.x])
    return _is_strided(site.inputs[at.x]) and site.inputs[at.ids].layout == "row"


def _fits_floats(site: Site) -> bool:
    w = _weight(site)
    x = site.inputs[0]
    return _fits(site) and w.layout == "row" and w.dtype in ("f32", "bf16") and x.dtype in ("f32", "bf16")


def _fits_codes(site: Site) -> bool:
    """Codes by codes: what the scheme rounds rows to."""
    row, w = _scheme(site), _weight(site)
    if row is None or row.act is None or w.layout != "row" or not _fits(site):
        return False
    if row.act == "f8e4m3" and site.arch in _NO_FP8:
        return False
    return row.act == row.codes and row.group in (None, 128)


def _fits_widened(site: Site) -> bool:
    row, w = _scheme(site), _weight(site)
    if row is None or row.act is not None or not _fits(site) or site.inputs[0].dtype not in ("f32", "bf16"):
        return False
    if row.codes == "i8":
        return row.group is None and w.layout == "row"
    # Codes less a whole number are exact in bf16.
    return (
        row.codes == "u4"
        and row.whole
        and w.layout == PAIRS
        and row.group is not None
        and int(w.shape[-1]) % row.group == 0
    )


class _Product:
    """The arguments of a product as they are gathered: in order, each a run-time one or a constant."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.at = _places(site)
        self.types: dict[str, str] = {}
        self.refs: list[Ref] = []
        self.constants: dict[str, Constant] = {}
        self.aligned: set[str] = set()
        w = _weight(site)
        self.n, self.k = (int(d) for d in w.shape[-2:])
        self.experts = int(w.shape[0]) if len(w.shape) == 3 else 0
        out = site.out
        inner = out.shape[1:-1]
        self.slots = int(inner[0]) if self.experts else 1
        self.rows = site.bucket.size(out.shape[0]) * prod(int(d) for d in inner)

    def choice(self) -> Choice:
        """The tile."""
        x, row = self.site.inputs[self.at.x], _scheme(self.site)
        weight = row.name if row else _weight(self.site).dtype
        op = self.site.node.op
        return self.site.tiles.choose(
            Product(op, x.dtype, weight, self.n, self.k, self.rows, self.experts, self.ragged)
        )

    @property
    def ragged(self) -> bool:
        """Whether x or the weight lies so that no 16 bytes can be read at once."""
        names = (self.site.node.inputs[i] for i in (self.at.x, self.at.parts[0]))
        steps = (self.k, *self.site.inputs[self.at.x].strides()[:-1])
        return any(n % 16 for n in steps) or not all(map(self.site.is_aligned, names))

    def input(self, name: str, index: int | None) -> None:
        """A pointer to an input, or None where the node has none."""
        if index is None:
            self.constants[name] = None
            return
        self.types[name] = pointer(self.site.inputs[index].dtype)
        self.refs.append(value(self.site.node.inputs[index]))
        if self.site.is_aligned(self.site.node.inputs[index]):
            self.aligned.add(name)

    def count(self, name: str, number: int) -> None:
        """A number that depends on the bucket, and so takes no part in what the kernel is."""
        self.types[name] = "i32"
        self.refs.append(i32(number))

    def number(self, name: str, number: int) -> None:
        """A number that depends on the weight; one that 16 divides allows wide accesses."""
        self.count(name, number)
        if number % 16 == 0:
            self.aligned.add(name)

    def output(self) -> None:
        out = self.site.node.out
        self.types["y_ptr"] = pointer(out.type.dtype)
        self.refs.append(value(out.name))
        if self.site.is_aligned(out.name):
            self.aligned.add("y_ptr")

    def scratch(self, name: str, buffer: str) -> None:
        self.types[name] = pointer("i32")
        self.refs.append(scratch(buffer))
        self.aligned.add(name)

    def common(self, tile: Tile) -> None:
        """The output, where rows come from, and the sizes."""
        x = self.site.inputs[self.at.x]
        self.output()
        if self.experts:
            self.scratch("experts_ptr", "experts")
            self.scratch("slots_ptr", "slots")
        else:
            self.constants |= {"experts_ptr": None, "slots_ptr": None}
        self.count("rows", _expert_tiles(self, tile) * tile.bm if self.experts else self.rows)
        self.number("n", self.n)
        self.number("k", self.k)
        strides = x.strides()
        apart = bool(self.experts) and len(x.shape) == 3
        self.number("x_row", strides[0] if self.experts else strides[-2])
        self.number("x_slot", strides[1] if apart else 0)
        self.constants |= {"SLOTS": self.slots, "EXPERTS": self.experts}
        self._sizes(tile)

    def _sizes(self, tile: Tile) -> None:
        self.constants |= {"EVEN_N": self.n % tile.bn == 0, "EVEN_K": self.k % tile.bk == 0}
        self.constants |= {"BM": tile.bm, "BN": tile.bn, "BK": tile.bk, "BAND": BAND}

    def launches(self, function: str, choice: Choice) -> tuple[Call, ...]:
        tile = choice.tile
        made = kernel(
            "gemm",
            function,
            self.types,
            self.constants,
            aligned=frozenset(self.aligned),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        node, rows = self.site.node, self.rows
        reads = tuple(dict.fromkeys(i for j, i in enumerate(node.inputs) if j != self.at.ids))
        if not self.experts:
            grid = (cdiv(rows, tile.bm) * cdiv(self.n, tile.bn), 1, 1)
            return (Call(made, grid, tuple(self.refs), reads, (node.out.name,), choice=choice),)
        tiles = _expert_tiles(self, tile)
        grid = (tiles * cdiv(self.n, tile.bn), 1, 1)
        bytes_ = {"counts": 4 * (self.experts + 1), "experts": 4 * tiles, "slots": 4 * tiles * tile.bm}
        reads = (*reads, "experts", "slots")
        product = Call(made, grid, tuple(self.refs), reads, (node.out.name,), bytes_, choice)
        return (*_routing(self, tile, tiles, bytes_), product)


def _expert_tiles(p: _Product, tile: Tile) -> int:
    """Tiles of rows that hold any choice: each expert's last tile may be part full; ids of no expert are one more."""
    return min(p.rows, cdiv(p.rows, tile.bm) + p.experts)


def _routing(p: _Product, tile: Tile, tiles: int, bytes_: Mapping[str, int]) -> tuple[Call, ...]:
    """The launches that put slots in order of their experts, each expert's in whole tiles."""
    assert p.at.ids is not None
    ids = p.site.inputs[p.at.ids]
    name = p.site.node.inputs[p.at.ids]
    shared = len(ids.shape) == 1  # every token has the same experts
    common: dict[str, Constant] = {"EXPERTS": p.experts, "PERIOD": p.slots if shared else 0, "BLOCK": 1024}

    def named(function: str, types: Mapping[str, str], constants: Mapping[str, Constant]) -> TritonKernel:
        return kernel(
            "experts",
            function,
            types,
            {**constants, **common},
            aligned=frozenset(t for t in types if t.endswith("_ptr")),
        )

    grid = (p.experts + 1, 1, 1)
    count = named("count", {"ids_ptr": "*i32", "counts_ptr": "*i32", "slots": "i32"}, {})
    place = named(
        "place",
        {
            "ids_ptr": "*i32",
            "counts_ptr": "*i32",
            "experts_ptr": "*i32",
            "slots_ptr": "*i32",
            "slots": "i32",
            "tiles": "i32",
        },
        {"BM": tile.bm, "GROUPS": 1 << p.experts.bit_length()},
    )
    counts, experts, slots = scratch("counts"), scratch("experts"), scratch("slots")
    first = (value(name), counts, i32(p.rows))
    second = (value(name), counts, experts, slots, i32(p.rows), i32(tiles))
    return (
        Call(count, grid, first, (name,), ("counts",), bytes_),
        Call(place, grid, second, (name, "counts"), ("experts", "slots"), bytes_),
    )


def _floats(site: Site) -> tuple[Call, ...]:
    p = _Product(site)
    choice = p.choice()
    p.input("x_ptr", p.at.x)
    p.input("w_ptr", p.at.parts[0])
    p.input("bias_ptr", p.at.bias)
    p.common(choice.tile)
    return p.launches("linear", choice)


def _codes(site: Site) -> tuple[Call, ...]:
    p, row = _Product(site), _scheme(site)
    assert row is not None
    choice = p.choice()
    p.input("x_ptr", p.at.x)
    p.input("row_scales_ptr", p.at.row_scales)
    p.input("w_ptr", p.at.parts[0])
    p.input("scales_ptr", p.at.parts[1])
    p.input("bias_ptr", p.at.bias)
    p.common(choice.tile)
    apart = len(site.inputs[p.at.x].shape) == 3 and bool(p.experts)
    p.number("scale_row", p.slots if apart else 1)
    p.number("scale_slot", int(apart))
    p.constants |= {"GROUP": row.group or 0, "EXACT": row.codes == "i8"}
    return p.launches("linear_codes", choice)


def _widened(site: Site) -> tuple[Call, ...]:
    p, row = _Product(site), _scheme(site)
    assert row is not None
    choice = p.choice()
    p.input("x_ptr", p.at.x)
    p.input("w_ptr", p.at.parts[0])
    p.input("scales_ptr", p.at.parts[1])
    p.input("zeros_ptr", p.at.parts[2] if row.zeros else None)
    p.input("bias_ptr", p.at.bias)
    p.common(choice.tile)
    form = "e2m1" if row.name == "mxfp4" else row.codes
    p.constants |= {"FORMAT": form, "OFFSET": float(row.offset), "GROUP": row.group or 0}
    return p.launches("linear_widened", choice)


def _rows_of(op: str) -> tuple[Row, ...]:
    experts = op.endswith("expert_linear")
    shape = "[T, K] or [T, k, K], ids i32[T, k] or [k]" if experts else "[.., K] (dense or rows at one stride)"
    if not op.startswith("q"):
        return (Row(op, _floats, f"x f32 or bf16{shape}, W f32 or bf16, bias f32", _fits_floats),)
    codes = f"x i8 or (from sm_89) f8e4m3{shape} with a scale a row, W of the same codes"
    wide = f"x f32 or bf16{shape}, W i8 with a scale a channel, or u4 in layout {PAIRS} with scales by group"
    return (Row(op, _codes, codes, _fits_codes), Row(op, _widened, wide, _fits_widened))


_OPS = ("linear", "qlinear", "expert_linear", "qexpert_linear")
DENSE: tuple[Row, ...] = tuple(row for op in _OPS for row in _rows_of(op))
