"""CUDA kernel rows of the paged cache: attention over it, and writing it.

Which of two ways a bucket takes is a matter of speed alone, since both give the same bits: one program a tile, or one a
tile and split of the keys and a second launch that merges them, where tiles are too few to fill a GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

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
from planc.codegen.cuda.rows import turning
from planc.compiler.ir.quant import LIMITS
from planc.compiler.ir.types import DTYPES, TensorType
from planc.errors import PlancError

_KV = ("f32", "bf16", "i8", "f8e4m3")
_SCALED = ("i8", "f8e4m3")  # elements that have scales
_NO_FP8 = (80, 86)  # archs that do not convert it
_SEQS = 128  # sequences that a program looks for its own among, at a time
_FILLED = 2  # programs an SM that fill a GPU: below that, keys are split
_SPLITS = 64  # most splits of a sequence's keys: each has a sum of values in memory
_SPLIT = 512  # positions of a split, at least
_HEADS = 4  # that one program merges
_RUN = 16  # keys of one access, at most: 16 bytes of codes


@dataclass(frozen=True)
class _Cache:
    """Where a layer lies in the pages, from a node's attributes."""

    site: Site

    def number(self, name: str) -> int:
        """An attribute that is a whole number."""
        return int(self.site.number(name))

    @property
    def dtype(self) -> str:
        """Of the elements."""
        return str(self.site.node.attr("dtype"))

    @property
    def scaled(self) -> bool:
        """Whether they have scales."""
        return self.dtype in _SCALED

    @property
    def has_kernels(self) -> bool:
        """Whether kernels read and write them."""
        return self.dtype in _KV and not (self.dtype == "f8e4m3" and self.site.arch in _NO_FP8)

    @cached_property
    def constants(self) -> Mapping[str, Constant]:
        """What both kernels know of the pages. SCALES is 0 where elements have none."""
        k, v, page = self.number("k_dim"), self.number("v_dim"), self.number("page_bytes")
        return {
            "K_DIM": k,
            "V_DIM": v,
            "K_PAD": _padded(k),
            "V_PAD": _padded(v),
            "BLOCK": self.number("block"),
            "PAGE": page // DTYPES[self.dtype].itemsize,
            "SCALES": page // 4 if self.scaled else 0,
        }

    def pointers(self, kv: str) -> dict[str, tuple[str, Ref] | None]:
        """Names that end in k, v, ks, vs -> types and places of the layer's parts; None for scales that are not."""
        parts: dict[str, tuple[str, Ref] | None] = {}
        for name in ("k", "v"):
            parts[name] = (pointer(self.dtype), value(kv, self.number(f"{name}_offset")))
        for name in ("k", "v"):
            at = self.number(f"{name}_scale_offset") if self.scaled else None
            parts[f"{name}s"] = None if at is None else (pointer("f32"), value(kv, at))
        return parts


@dataclass(frozen=True)
class _Tile:
    """Rows and keys of one product, and the warps that make it. One for all buckets: they decide the order of sums."""

    rows: int
    keys: int
    warps: int


def _tile(cache: _Cache, arch: int) -> _Tile:
    """64 rows are the least that sm_90 multiplies with wgmma; products of f32 have no tensor cores. Warps and keys are
    those that keep sums in registers, by what ptxas says.
    """
    pad = max(_padded(cache.number("k_dim")), _padded(cache.number("v_dim")))
    if cache.dtype == "f32":
        return _Tile(16, 16, 4 if pad <= 128 else 8)
    narrow = pad <= 64 or (pad == 128 and arch == 90 and cache.dtype == "bf16")
    return _Tile(64, 64 if pad <= 128 else 32, 4 if narrow else 8)


def _padded(n: int) -> int:
    """The next power of two, at least what tensor cores take."""
    return max(16, power_of_two(n))


def _split_size(stride: int, block: int) -> int:
    """Positions of a split: of a page table this wide, _SPLITS are the most."""
    return max(_SPLIT, power_of_two(cdiv(stride * block, _SPLITS)))


class _Attention:
    """The arguments of attention, gathered once for its kernels."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.cache = _Cache(site)
        q, _, table = site.inputs[:3]
        self.tokens, self.seqs = site.bucket.tokens, site.bucket.seqs
        self.heads = int(q.shape[1])
        self.kv_heads = self.cache.number("heads")
        self.group = self.heads // self.kv_heads
        self.tile = _tile(self.cache, site.arch)
        self.parts = cdiv(self.group, self.tile.rows)
        self.tile_heads = cdiv(self.group, self.parts)
        self.tiles = self.tokens // (self.tile.rows // self.tile_heads) + self.seqs
        self.stride = _width(site, table)
        self.split = _split_size(self.stride, self.cache.number("block"))
        self.splits = cdiv(self.stride * self.cache.number("block"), self.split)
        extra = list(site.node.inputs[5:])
        self.sinks = extra.pop(0) if site.flag("sinks") else None
        self.slopes = extra.pop(0) if site.flag("alibi") else None

    def calls(self) -> tuple[Call, ...]:
        """One launch, or two where keys are split."""
        if self.splits == 1 or self.tiles * self.kv_heads * self.parts >= _FILLED * self.site.tiles.gpu.sms:
            return (self._whole(),)
        return self._split(), self._combine()

    @property
    def _window(self) -> dict[str, Constant]:
        kind = str(self.site.node.attr("kind"))
        return {"KIND": kind, "WINDOW": 0 if kind == "causal" else int(self.site.number("window"))}

    @property
    def _constants(self) -> dict[str, Constant]:
        q = self.site.inputs[0]
        row, head, _ = q.strides()
        return {
            "Q_ROW": row,
            "Q_HEAD": head,
            "TABLE": self.stride,
            "GROUP": self.group,
            "HEADS": self.tile_heads,
            "BM": self.tile.rows,
            "BN": self.tile.keys,
            "SPLIT": self.split,
            "SEQS": _SEQS,
            **self.cache.constants,
            "RUN": min(self.cache.number("block") & -self.cache.number("block"), _RUN),
            "WIDE": self.cache.dtype == "f32",
            **self._window,
            "SCALE": self.site.number("scale"),
            "SOFTCAP": self.site.number("softcap", 0.0),
        }

    def _inputs(self, *, sinks: bool) -> dict[str, tuple[str, Ref] | None]:
        q, kv, table, start, positions = self.site.node.inputs[:5]
        types = self.site.inputs
        out: dict[str, tuple[str, Ref] | None] = {"q_ptr": (pointer(types[0].dtype), value(q))}
        out |= {f"{name}_ptr": part for name, part in self.cache.pointers(kv).items()}
        ints = (("table_ptr", table), ("start_ptr", start), ("positions_ptr", positions))
        out |= {name: (pointer("i32"), value(source)) for name, source in ints}
        heads = ([("sinks_ptr", self.sinks)] if sinks else []) + [("slopes_ptr", self.slopes)]
        return out | {name: (pointer("f32"), value(source)) if source else None for name, source in heads}

    def _whole(self) -> Call:
        out = self.site.node.out
        given = self._inputs(sinks=True) | {"out_ptr": (pointer(out.type.dtype), value(out.name))}
        given |= {"tokens": ("i32", i32(self.tokens)), "seqs": ("i32", i32(self.seqs))}
        constants = self._constants | {"OUT_ROW": out.type.strides()[0]}
        return self._call("attend", (self.tiles, self.kv_heads, self.parts), given, constants, (out.name,))

    def _split(self) -> Call:
        given = self._inputs(sinks=False)
        given |= {f"{name}_ptr": (pointer("f32"), scratch(name)) for name in ("stats", "acc")}
        given |= {"tokens": ("i32", i32(self.tokens)), "seqs": ("i32", i32(self.seqs))}
        constants = self._constants | {"Q_HEADS": self.heads, "SPLITS": self.splits}
        grid = (self.tiles, self.kv_heads * self.parts, self.splits)
        return self._call("attend_split", grid, given, constants, ("stats", "acc"))

    def _combine(self) -> Call:
        out, (start, positions) = self.site.node.out, self.site.node.inputs[3:5]
        given: dict[str, tuple[str, Ref] | None] = {
            **{f"{name}_ptr": (pointer("f32"), scratch(name)) for name in ("stats", "acc")},
            "start_ptr": (pointer("i32"), value(start)),
            "positions_ptr": (pointer("i32"), value(positions)),
            "sinks_ptr": (pointer("f32"), value(self.sinks)) if self.sinks else None,
            "out_ptr": (pointer(out.type.dtype), value(out.name)),
            "seqs": ("i32", i32(self.seqs)),
        }
        constants: dict[str, Constant] = {
            "OUT_ROW": out.type.strides()[0],
            "Q_HEADS": self.heads,
            "SPLITS": self.splits,
            "ROWS": _HEADS,
            "SPLIT": self.split,
            "V_DIM": self.cache.constants["V_DIM"],
            "V_PAD": self.cache.constants["V_PAD"],
            **self._window,
        }
        grid = (self.tokens, cdiv(self.heads, _HEADS), 1)
        return self._call("combine", grid, given, constants, (out.name,))

    def _call(
        self,
        function: str,
        grid: tuple[int, int, int],
        given: Mapping[str, tuple[str, Ref] | None],
        constants: Mapping[str, Constant],
        writes: tuple[str, ...],
    ) -> Call:
        sums = 4 * self.tokens * self.heads * self.splits
        sizes = {"stats": 2 * sums, "acc": sums * self.cache.number("v_dim")}
        warps = 4 if function == "combine" else self.tile.warps
        return _call(self.site, "attention", function, grid, given, constants, writes, sizes, warps)


def _call(
    site: Site,
    source: str,
    function: str,
    grid: tuple[int, int, int],
    given: Mapping[str, tuple[str, Ref] | None],
    constants: Mapping[str, Constant],
    writes: tuple[str, ...],
    sizes: Mapping[str, int],
    warps: int,
) -> Call:
    """A call from its arguments by name: type and place, or None where the node has none of that name."""
    args = {name: arg for name, arg in given.items() if arg is not None}
    absent = {name: None for name, arg in given.items() if arg is None}
    made = kernel(
        source,
        function,
        {name: kind for name, (kind, _) in args.items()},
        {**absent, **constants},
        aligned=frozenset(name for name, (_, ref) in args.items() if _is_aligned(site, ref)),
        num_warps=warps,
        num_stages=2,
    )
    refs = tuple(ref for _, ref in args.values())
    named = dict.fromkeys(str(r.value) for r in refs if r.kind in ("value", "scratch"))
    used = {name: sizes[name] for name in named if name in sizes}
    return Call(made, grid, refs, tuple(n for n in named if n not in writes), writes, used)


def _is_aligned(site: Site, ref: Ref) -> bool:
    """Whether a pointer is a multiple of 16 bytes: the parts of a page are."""
    return ref.kind == "scratch" or (ref.kind == "value" and site.is_aligned(str(ref.value)))


def _width(site: Site, table: TensorType) -> int:
    """Pages of a row of the page table."""
    width = table.shape[1]
    if not isinstance(width, int):
        raise PlancError(
            f"{site.node.op} at {site.node.loc or 'top level'}: the page table is {table}; the width of its rows must "
            "be a number when kernels are chosen"
        )
    return width


def _append(site: Site) -> tuple[Call, ...]:
    k, v, slots, kv = site.node.inputs
    given = _named(site, {"k_ptr": k, "v_ptr": v, "slots_ptr": slots}) | _pages(site)
    grid = (site.bucket.tokens, _Cache(site).number("heads"), 1)
    return (_call(site, "kv", "append", grid, given, _writing(site, *site.inputs[:2]), (kv,), {}, 1),)


def _rotary_append(site: Site) -> tuple[Call, ...]:
    names = ("q_ptr", "k_ptr", "v_ptr", "cos_ptr", "sin_ptr", "positions_ptr", "slots_ptr")
    given = _named(site, dict(zip(names, site.node.inputs, strict=False))) | _pages(site)
    y, kv = site.node.out.name, site.node.inputs[-1]
    given["y_ptr"] = (pointer(site.out.dtype), value(y))
    q, k, v, table = site.inputs[:4]
    row, head, _ = q.strides()
    turns = turning(q, table)
    heads = _Cache(site).number("heads")
    constants = {"Q_ROW": row, "Q_HEAD": head, "KV_HEADS": heads, "INTERLEAVED": site.flag("interleaved"), **turns}
    grid = (site.bucket.tokens, heads + cdiv(turns["HEADS"], turns["LINES"]), 1)
    return (_call(site, "kv", "rotary_append", grid, given, constants | _writing(site, k, v), (kv, y), {}, 4),)


def _named(site: Site, names: Mapping[str, str]) -> dict[str, tuple[str, Ref] | None]:
    """Inputs of the node by the names of arguments: types and places."""
    types = dict(zip(site.node.inputs, site.inputs, strict=True))
    return {argument: (pointer(types[name].dtype), value(name)) for argument, name in names.items()}


def _pages(site: Site) -> dict[str, tuple[str, Ref] | None]:
    """The parts of the cache that a node writes, its last input."""
    names = {"k": "k_pages_ptr", "v": "v_pages_ptr", "ks": "k_scales_ptr", "vs": "v_scales_ptr"}
    return {names[part]: arg for part, arg in _Cache(site).pointers(site.node.inputs[-1]).items()}


def _writing(site: Site, k: TensorType, v: TensorType) -> dict[str, Constant]:
    """What a kernel that writes knows of keys and values and of the pages."""
    cache = _Cache(site)
    constants: dict[str, Constant] = {}
    for name, t in (("K", k), ("V", v)):
        row, head, _ = t.strides()
        constants |= {f"{name}_ROW": row, f"{name}_HEAD": head}
    constants |= dict(cache.constants) | {"LIMIT": float(LIMITS[cache.dtype]) if cache.scaled else 0.0}
    return constants | {"WHOLE": cache.dtype == "i8"}


def _fits_attention(site: Site) -> bool:
    q, out = site.inputs[0], site.out
    kinds = ("causal", "sliding", "chunked")
    return (
        _Cache(site).has_kernels
        and str(site.node.attr("kind")) in kinds
        and _is_view(q)
        and out.layout == "row"
        and all(t.layout == "row" and t.dtype == "f32" for t in site.inputs[5:])
    )


def _fits_append(site: Site) -> bool:
    return _Cache(site).has_kernels and _is_view(site.inputs[0]) and _is_view(site.inputs[1])


def _fits_rotary_append(site: Site) -> bool:
    views, angles = site.inputs[:3], site.inputs[3:5]
    return _Cache(site).has_kernels and all(map(_is_view, views)) and all(t.layout == "row" for t in angles)


def _is_view(t: TensorType) -> bool:
    return t.dtype in ("f32", "bf16") and (t.layout == "row" or t.layout.startswith("strides:"))


_CACHES = "caches of " + ", ".join(_KV) + " (from sm_89 on)"
ATTENTION: tuple[Row, ...] = (
    Row(
        "paged_attention",
        lambda site: _Attention(site).calls(),
        f"queries of f32 or bf16, dense or strided, and {_CACHES}",
        _fits_attention,
    ),
    Row("kv_append", _append, f"keys and values of f32 or bf16, dense or strided, and {_CACHES}", _fits_append),
    Row(
        "rotary_append",
        _rotary_append,
        f"queries, keys and values of f32 or bf16, dense or strided, and {_CACHES}",
        _fits_rotary_append,
    ),
)
