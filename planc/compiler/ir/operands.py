"""What the inputs of a quantized product are: in go a node's attributes and its inputs in order, out they come named.

The order is x, the scales of its rows (for a scheme that rounds activations), ids (of experts), the parts of the
weight, the bias. Whether the inputs are types, arrays or names is all the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from planc.compiler.ir import hadamard
from planc.compiler.ir.quant import Scheme, scheme
from planc.compiler.ir.types import Attr, TensorType

T = TypeVar("T")
Attrs = Mapping[str, Attr]
Types = Sequence[TensorType]
Out = tuple[TensorType, ...]


@dataclass(frozen=True)
class Operands(Generic[T]):
    """`row_scales` and `ids` are None where the op has none; `others` are what follows the parts: the bias, if any."""

    x: T
    row_scales: T | None
    ids: T | None
    parts: tuple[T, ...]
    others: tuple[T, ...]

    @property
    def bias(self) -> T | None:
        return self.others[0] if self.others else None


def scheme_of(attrs: Attrs) -> Scheme:
    """The scheme that the attribute names; KeyError when there is none."""
    return scheme(str(attrs["scheme"]))


def operands(attrs: Attrs, items: Sequence[T], experts: bool = False) -> Operands[T]:
    """The inputs of qlinear, or of qexpert_linear. IndexError when they are too few."""
    row = scheme_of(attrs)
    x, *rest = items
    row_scales = rest.pop(0) if row.act else None
    ids = rest.pop(0) if experts else None
    count = len(row.parts)
    if len(rest) < count:
        raise IndexError(f"scheme {row.name} has {count} parts")
    return Operands(x, row_scales, ids, tuple(rest[:count]), tuple(rest[count:]))


def check_parts(attrs: Attrs, parts: Types) -> None:
    """ValueError unless these are the parts that the scheme makes of a weight with the shape of the codes."""
    row = scheme_of(attrs)
    if len(parts) != len(row.parts):
        raise ValueError(f"scheme {row.name} has parts {', '.join(row.parts)}, got {len(parts)} tensors")
    whole = TensorType("f32", parts[0].shape)
    if parts[0].dtype != row.codes:
        raise ValueError(f"scheme {row.name} has codes of {row.codes}, got {parts[0]}")
    held = parts[1].dtype != row.scales
    for name, got in zip(row.parts[1:], parts[1:], strict=True):
        wanted = row.part_type(whole, name, held=held)
        if got != wanted:
            raise ValueError(f"scheme {row.name}: part {name} of {whole} must be {wanted}, got {got}")


def check_rows(attrs: Attrs, given: Operands[TensorType]) -> None:
    """ValueError unless x is what the scheme multiplies: floats, or codes with a scale for each row."""
    row = scheme_of(attrs)
    wanted = (row.act,) if row.act else ("f32", "bf16")
    if given.x.dtype not in wanted:
        raise ValueError(f"scheme {row.name} multiplies rows of {' or '.join(wanted)}, got {given.x}")
    needed, scales = scales_type(given.x, row.rows_group), given.row_scales
    if scales is not None and (scales.dtype, scales.shape) != (needed.dtype, needed.shape):
        raise ValueError(f"the rows of {given.x} need scales {needed}, got {scales}")


def scales_type(x: TensorType, group: int | None) -> TensorType:
    """Of the scales of rows: one a row, or one for each so many features."""
    return TensorType("f32", (*x.shape[:-1], *((int(x.shape[-1]) // group,) if group else ())))


def rounding(items: Sequence[T], types: Types) -> tuple[T, T | None, T | None]:
    """The inputs of quantize_rows, told apart by dtype: x, the shift f32, the outliers i32; the last two only if given.
    So are those of a recipe's `quantize`: the weight, its bounds, its outliers.
    """
    x, *rest = zip(items, types, strict=True)
    found = {t.dtype: item for item, t in rest}
    return x[0], found.get("f32"), found.get("i32")


def codes_tail(attrs: Attrs, taken: Sequence[str]) -> str:
    """What the name of the codes has behind that of their rows: the attributes of quantize_rows, what else it takes."""
    turned = f".h{attrs['hadamard']}" if "hadamard" in attrs else ""
    shared = f".g{attrs['group']}" if "group" in attrs else ""
    return f".{attrs['dtype']}{turned}{shared}" + "".join(f".{name}" for name in taken)


def rows_types(attrs: Attrs, types: Types) -> Out:
    """x f32[.., K], maybe a shift f32[K] that is taken from each row, give codes[.., K] and scales f32[..]; `hadamard`
    is the block in which rows turn. With `group` each so many features have a scale, f32[.., K/group]. With outliers
    i32[n], features that are kept to two digits, f8e4m3 codes [.., K + 2n]: behind the first K stand the second digits
    of the outliers, and their first ones again.
    """
    x, *rest = types
    outliers = [t for t in rest if t.dtype == "i32"]
    shift = rest[: len(rest) - len(outliers)]
    if x.dtype != "f32" or len(x.shape) < 2:
        raise ValueError(f"quantize_rows: x must be f32 with rows, got {x}")
    if [(t.dtype, t.shape) for t in shift] not in ([], [("f32", x.shape[-1:])]):
        raise ValueError(
            f"quantize_rows: rows of {x} take a shift f32[{x.shape[-1]}], got {', '.join(map(str, shift))}"
        )
    if attrs["dtype"] not in ("i8", "f8e4m3"):
        raise ValueError(f"quantize_rows: rows are rounded to i8 or f8e4m3, not {attrs['dtype']}")
    size = attrs.get("hadamard", 1)
    if not isinstance(size, int) or size & (size - 1) or not 1 <= size <= hadamard.block(int(x.shape[-1])):
        raise ValueError(f"quantize_rows: rows of {x} do not turn in blocks of {size}")
    k, group = int(x.shape[-1]), attrs.get("group")
    if group is not None and (not isinstance(group, int) or group < 1 or k % group or outliers):
        raise ValueError(f"quantize_rows: rows of {x} have no scales for each {group} features")
    for t in outliers:
        if rest[-1:] != outliers or len(t.shape) != 1 or not 1 <= int(t.shape[0]) <= k:
            raise ValueError(f"quantize_rows: rows of {x} take outliers i32[n] last, got {', '.join(map(str, rest))}")
        if attrs["dtype"] != "f8e4m3" or size > 1:
            raise ValueError("quantize_rows: only rows of f8e4m3 that do not turn have outliers")
        k += 2 * int(t.shape[0])
    return TensorType(str(attrs["dtype"]), (*x.shape[:-1], k)), scales_type(x, group)
