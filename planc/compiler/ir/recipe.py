"""Weight recipes: in goes a checkpoint's tensors, out come a weight's bytes; the recipe itself is data that prints."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from planc.compiler.ir.balance import balanced
from planc.compiler.ir.operands import rounding
from planc.compiler.ir.packing import pack
from planc.compiler.ir.quant import scheme
from planc.compiler.ir.types import DTYPES, PACKED, Attr, TensorType, dtype_name

# Steps that only move elements: they commute with a cast.
MOVES = frozenset({"concat", "slice", "reshape", "transpose", "shard"})
Reader = Callable[[str], np.ndarray]
RowReader = Callable[[str, int, int], np.ndarray]


@dataclass(frozen=True)
class Recipe:
    """One step of a recipe: leaves are `load` (a checkpoint tensor) and `const` (a computed one, by digest).

    Inner steps are `quantize` (attrs scheme, part, maybe hadamard, the blocks that turn; after the weight maybe f32
    bounds that clip it and i32 outliers, features that are kept to two digits), `balance` (balance.py), `pack` (attr
    layout), `shard` (a rank's part of an axis, see shards.py), or any op of the op table without effects, evaluated by
    its reference, so that `1 + w` of a norm folds with no code of its own.
    """

    op: str
    inputs: tuple["Recipe", ...] = ()
    attrs: tuple[tuple[str, Attr], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "attrs", tuple(sorted(self.attrs)))
        object.__setattr__(self, "_hash", hash((self.op, self.inputs, self.attrs)))

    def __hash__(self) -> int:
        """Computed once: a recipe of thousands of tensors is looked up often."""
        return self._hash  # type: ignore[attr-defined,no-any-return]

    def get(self, name: str) -> Attr:
        """The attribute `name` (KeyError if absent)."""
        return dict(self.attrs)[name]

    def leaves(self) -> Iterator["Recipe"]:
        """Every `load` and `const` below, left to right."""
        if not self.inputs:
            yield self
        for r in self.inputs:
            yield from r.leaves()

    def steps(self) -> Iterator["Recipe"]:
        """The recipe and every recipe below it."""
        yield self
        for r in self.inputs:
            yield from r.steps()

    @property
    def loads(self) -> tuple[str, ...]:
        """Names of the checkpoint tensors that the recipe reads."""
        return tuple(str(r.get("name")) for r in self.leaves() if r.op == "load")


def load(name: str, dtype: str, shape: tuple[int, ...]) -> Recipe:
    """The checkpoint tensor `name`, whose dtype and shape are part of the recipe so that a wrong one is refused."""
    return Recipe("load", attrs=(("name", name), ("dtype", dtype), ("shape", shape)))


def const(digest: str, dtype: str, shape: tuple[int, ...]) -> Recipe:
    """A tensor computed by the compiler (a rotary table, a scale), found in the constants by its digest."""
    return Recipe("const", attrs=(("digest", digest), ("dtype", dtype), ("shape", shape)))


def digest(array: np.ndarray) -> str:
    """The name of a constant: a prefix of the sha256 of its dtype, shape and bytes."""
    head = f"{dtype_name(array.dtype)}{array.shape}".encode()
    return hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def constant(array: np.ndarray) -> tuple[Recipe, dict[str, np.ndarray]]:
    """The `const` recipe of an array, and the entry that the graph's constants need for it."""
    key = digest(array)
    return const(key, dtype_name(array.dtype), array.shape), {key: array}


def step(op: str, *inputs: Recipe, **attrs: Attr) -> Recipe:
    """An inner step: `step("cast", r, dtype="bf16")`."""
    return Recipe(op, inputs, tuple(attrs.items()))


def cast(recipe: Recipe, dtype: str) -> Recipe:
    """The recipe in another dtype, cast at the leaves below its moves, so that no whole tensor is ever cast at once."""
    if infer(recipe).dtype == dtype:
        return recipe
    if recipe.op in MOVES:
        return replace(recipe, inputs=tuple(cast(r, dtype) for r in recipe.inputs))
    return step("cast", recipe, dtype=dtype)


def infer(recipe: Recipe) -> TensorType:
    """Type of what the recipe makes; ValueError or KeyError when its steps do not fit. Worked out once a recipe."""
    made: TensorType | None = recipe.__dict__.get("_type")
    if made is None:
        made = _infer(recipe)
        object.__setattr__(recipe, "_type", made)
    return made


def _infer(recipe: Recipe) -> TensorType:
    from planc.compiler.ir.ops import OPS

    attrs = dict(recipe.attrs)
    if recipe.op in ("load", "const"):
        return TensorType(str(attrs["dtype"]), _ints(attrs["shape"]))
    types = [infer(r) for r in recipe.inputs]
    if recipe.op == "pack":
        layout = str(attrs["layout"])
        if layout not in PACKED:
            raise ValueError(f"unknown packed layout {layout!r}; known: {', '.join(PACKED)}")
        return TensorType(types[0].dtype, types[0].shape, layout)
    if recipe.op == "quantize":
        w, _, outliers = rounding(types, types)
        count = 0 if outliers is None else int(outliers.shape[0])
        return scheme(str(attrs["scheme"])).part_type(w, str(attrs["part"]), count)
    if recipe.op == "balance":
        return types[0]
    if recipe.op == "shard":
        from planc.compiler.ir.shards import part_type

        return part_type(attrs, types[0])
    return OPS[recipe.op].infer(attrs, types)[0]


def evaluate(
    recipe: Recipe, read: Reader, constants: Mapping[str, np.ndarray], rows: RowReader | None = None
) -> np.ndarray:
    """The array that the recipe makes, in the storage dtype of `infer(recipe)`; packed ones in their padded shape.

    Reads one checkpoint tensor at a time and drops it as soon as the step above is done. `rows` reads a range of a
    tensor's first axis, for recipes that need no more. ValueError names a tensor whose dtype or shape is not the
    recipe's.
    """
    from planc.compiler.ir.ops import OPS

    attrs = dict(recipe.attrs)
    if recipe.op == "load":
        return _checked(read(str(attrs["name"])), str(attrs["name"]), attrs)
    if recipe.op == "const":
        return _checked(constants[str(attrs["digest"])], f"constant {attrs['digest']}", attrs)
    if recipe.op == "shard":
        raise ValueError("a part that differs by rank has no bytes of its own; ask for that of a rank (shards.of_rank)")
    if recipe.op == "concat":
        whole = infer(recipe)
        out = np.empty(_concrete(whole), DTYPES[whole.dtype])
        _fill(out, recipe, lambda r: evaluate(r, read, constants, rows))
        return out
    if rows is not None and recipe.op == "slice" and recipe.inputs[0].op == "load" and attrs["axis"] == 0:
        return _row_range(recipe, rows)
    args = [evaluate(r, read, constants, rows) for r in recipe.inputs]
    if recipe.op == "pack":
        return pack(args.pop(), str(attrs["layout"]))
    if recipe.op == "quantize":
        w, clip, outliers = rounding(args, [infer(r) for r in recipe.inputs])
        turned = int(attrs.get("hadamard", 1))  # type: ignore[arg-type]
        return scheme(str(attrs["scheme"])).part(w, str(attrs["part"]), clip, turned, outliers)
    if recipe.op == "balance":
        return balanced(args[0], args[1], attrs)
    types = [infer(r) for r in recipe.inputs]
    return OPS[recipe.op].ref(attrs, args, types)[0]


def _fill(out: np.ndarray, recipe: Recipe, made: Callable[[Recipe], np.ndarray]) -> None:
    """Writes what the recipe makes to `out`. The parts of a concat go to their places one by one, however deep it lies
    below other moves, so that they are never all held beside the whole.
    """
    if recipe.op == "concat":
        axis, at = int(recipe.get("axis")), 0  # type: ignore[arg-type]
        for r in recipe.inputs:
            size = _concrete(infer(r))[axis]
            _fill(out[(slice(None),) * axis + (slice(at, at + size),)], r, made)
            at += size
    elif recipe.op == "transpose":
        _fill(out.transpose(np.argsort(_ints(recipe.get("perm")))), recipe.inputs[0], made)
    elif recipe.op == "reshape" and np.may_share_memory(seen := out.reshape(_concrete(infer(recipe.inputs[0]))), out):
        _fill(seen, recipe.inputs[0], made)
    elif recipe.op == "cast":
        out[...] = made(recipe.inputs[0])
    else:
        out[...] = made(recipe)


def _row_range(recipe: Recipe, rows: RowReader) -> np.ndarray:
    source = dict(recipe.inputs[0].attrs)
    start, stop = int(recipe.get("start")), int(recipe.get("stop"))  # type: ignore[arg-type]
    shape = (stop - start, *_ints(source["shape"])[1:])
    return _checked(rows(str(source["name"]), start, stop), str(source["name"]), source | {"shape": shape})


def _concrete(t: TensorType) -> tuple[int, ...]:
    return tuple(int(d) for d in t.shape)


def _checked(array: np.ndarray, name: str, attrs: Mapping[str, Attr]) -> np.ndarray:
    want_dtype, want_shape = str(attrs["dtype"]), _ints(attrs["shape"])
    if array.shape != want_shape:
        raise ValueError(f"{name} has shape {array.shape}, the plan was compiled for {want_shape}")
    if array.dtype != DTYPES[want_dtype]:
        raise ValueError(f"{name} has dtype {array.dtype}, the plan was compiled for {want_dtype}")
    return array


def _ints(attr: Attr) -> tuple[int, ...]:
    assert isinstance(attr, tuple)
    return attr
