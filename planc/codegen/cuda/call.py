"""Calls of the CUDA target: in goes a node with its types, an arch and a bucket, out come kernels with their arguments.

A kernel is a function of `kernels/` and everything that specialises it. Its name holds all of that but the arch, so
equal names are equal kernels.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from planc.compiler.ir.graph import Node
from planc.compiler.ir.ops import OPS
from planc.compiler.ir.types import TensorType
from planc.errors import PlancError

if TYPE_CHECKING:
    from planc.codegen.cuda.tiles import Choice, Tiles

ARCHES = (80, 86, 89, 90, 100, 120)  # compute capabilities that kernels are chosen for
_LIKE = {121: 120}  # others -> the one whose choices they share: the same SM in another chip
Constant = bool | int | float | str | tuple["Constant", ...] | None
# Element types of memory as Triton spells them in a signature; four-bit codes lie two a byte.
ELEMENTS: Mapping[str, str] = {
    "f32": "fp32",
    "f16": "fp16",
    "bf16": "bf16",
    "f8e4m3": "fp8e4nv",
    "i8": "i8",
    "u4": "u8",
    "u8": "u8",
    "i32": "i32",
    "i64": "i64",
}
_NAME_LIMIT = 120  # characters; longer names end in a digest, for the sake of file systems


def arch_of(sm: int) -> int:
    """The compute capability whose choices one shares. PlancError when kernels are made for none."""
    arch = _LIKE.get(sm, sm)
    if arch not in ARCHES:
        raise PlancError(f"no kernels for sm_{arch}; kernels are made for {', '.join(f'sm_{a}' for a in ARCHES)}")
    return arch


@dataclass(frozen=True)
class TritonKernel:
    """A function of `kernels/<source>.py` and what specialises it.

    `signature` maps each run-time argument to Triton's name of its type, `constants` every other argument to its
    value; together they are all arguments of the function. `aligned` are run-time arguments that are multiples of 16
    (bytes for a pointer), which allows 16-byte accesses.

    With the suffix `.cu` the source is CUDA C++, `constants` are its macros, and nothing else specialises it.
    """

    name: str
    source: str
    function: str
    signature: Mapping[str, str] = field(compare=False)
    constants: Mapping[str, Constant] = field(compare=False)
    aligned: frozenset[str] = field(compare=False)
    num_warps: int = field(compare=False)
    num_stages: int = field(compare=False)
    suffix: str = field(default=".py", compare=False)


@dataclass(frozen=True)
class Bucket:
    """What one launch sequence is made for: its capacity in tokens, sequences and rows of logits."""

    tokens: int
    seqs: int
    rows: int

    @property
    def dims(self) -> dict[str, int]:
        """Lengths of the axes of activations."""
        return {"T": self.tokens, "S": self.seqs, "R": self.rows}

    def size(self, dim: int | str) -> int:
        """The length of an axis. KeyError when a symbol is no axis of activations."""
        return dim if isinstance(dim, int) else self.dims[dim]


@dataclass(frozen=True)
class Ref:
    """An argument: kind `value` (a value of the graph, by name) or `scratch` (a buffer of the call, by name), both at
    an offset in bytes; or a number, kind `i32`, `i64` or `f32`."""

    kind: str
    value: str | int | float
    offset: int = 0


@dataclass(frozen=True)
class Call:
    """One launch. `args` are in the order of the kernel's signature; `reads` and `writes` name values of the graph and
    scratch buffers; `scratch` gives the bytes of buffers that live from their first to their last call of the node.
    A product has the `choice` of its tile."""

    kernel: TritonKernel
    grid: tuple[int, int, int]
    args: tuple[Ref, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    scratch: Mapping[str, int] = field(default_factory=dict, compare=False)
    choice: "Choice | None" = field(default=None, compare=False)


@dataclass(frozen=True)
class Site:
    """What a row of the table sees: a node, the types of its inputs in order, an arch, a bucket, what chooses tiles.

    `aligned` names the values that lie at a multiple of 16 bytes; None means all but strided views.
    """

    node: Node
    inputs: tuple[TensorType, ...]
    arch: int
    bucket: Bucket
    tiles: "Tiles"
    aligned: Set[str] | None = None

    @property
    def out(self) -> TensorType:
        """Type of the first output."""
        return self.node.out.type

    def is_aligned(self, name: str) -> bool:
        """Whether a value lies at a multiple of 16 bytes."""
        if self.aligned is not None:
            return name in self.aligned
        at = self.node.inputs.index(name) if name in self.node.inputs else None
        return at is None or not self.inputs[at].layout.startswith("strides:")

    def number(self, name: str, default: float | None = None) -> float:
        """A numeric attribute."""
        value = self.node.attr(name, default)
        assert isinstance(value, int | float)
        return value

    def flag(self, name: str) -> bool:
        """A truth attribute; an absent one is false."""
        return bool(self.node.attr(name, False))


@dataclass(frozen=True)
class Row:
    """One row of the kernel table: the nodes of `op` that `when` accepts are run by the calls that `make` gives.

    `says` names what it takes, for errors.
    """

    op: str
    make: Callable[[Site], tuple[Call, ...]]
    says: str
    when: Callable[[Site], bool] = lambda site: True


def calls(
    node: Node,
    types: Mapping[str, TensorType],
    sm: int,
    bucket: Bucket,
    aligned: Set[str] | None = None,
    tiles: "Tiles | None" = None,
) -> tuple[Call, ...]:
    """The launches that run `node`, in order; none for a view. PlancError says what exists when no kernel fits.

    `aligned` names the values whose address is a multiple of 16 bytes, which wide accesses need; without it, every
    value is taken to be but strided views. `tiles` chooses for a GPU, by default for the best-known of the SM.
    """
    from planc.codegen.cuda.table import TABLE  # the table needs this module's types
    from planc.codegen.cuda.tiles import Tiles  # so does what chooses

    arch = arch_of(sm)
    if OPS[node.op].view:
        return ()
    site = Site(node, tuple(types[i] for i in node.inputs), arch, bucket, tiles or Tiles.default(sm), aligned)
    rows = [r for r in TABLE if r.op == node.op]
    for row in rows:
        if row.when(site):
            return row.make(site)
    have = "; ".join(r.says for r in rows)
    have = have or "none (ops with kernels: " + ", ".join(sorted({r.op for r in TABLE})) + ")"
    raise PlancError(
        f"{node.op} at {node.loc or 'top level'} has no kernel on sm_{arch} for "
        f"({', '.join(map(str, site.inputs))}); kernels of {node.op}: {have}"
    )


def page_table(pages: int) -> dict[str, TensorType]:
    """The type of the page table by its name, its width a number, as the kernels of a plan have it."""
    return {"page_table": TensorType("i32", ("S", pages))}


def kernel(
    source: str,
    function: str,
    signature: Mapping[str, str],
    constants: Mapping[str, Constant],
    *,
    aligned: frozenset[str] = frozenset(),
    num_warps: int = 4,
    num_stages: int = 3,
    suffix: str = ".py",
) -> TritonKernel:
    """A kernel whose name is made from all of the arguments."""
    tags = [f"{_short(name)}{_text(value)}" for name, value in constants.items() if value is not None]
    parts = [
        source,
        function,
        *(f"{n}:{t}" for n, t in signature.items()),
        *(f"{n}={v!r}" for n, v in constants.items()),
    ]
    parts += [*sorted(aligned), f"w{num_warps}", f"s{num_stages}", *([suffix] if suffix != ".py" else [])]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
    elements = "".join(dict.fromkeys(t.removeprefix("*") for t in signature.values() if t.startswith("*")))
    readable = re.sub(r"\W", "_", "_".join([function, elements, *tags, f"w{num_warps}"]))
    name = f"{readable[: _NAME_LIMIT - 13]}_{digest}"
    types, numbers = dict(signature), dict(constants)
    return TritonKernel(name, source, function, types, numbers, aligned, num_warps, num_stages, suffix)


def _short(name: str) -> str:
    return name.lower().replace("_", "")


def _text(value: Constant) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, tuple):
        return "x".join(map(_text, value))
    return repr(value).replace("-", "m").replace("+", "").replace(".", "p").strip("'")


def pointer(dtype: str) -> str:
    """Triton's name of a pointer to elements of a dtype of the graph. KeyError when kernels know none."""
    return "*" + ELEMENTS[dtype]


def value(name: str, offset: int = 0) -> Ref:
    """A value of the graph."""
    return Ref("value", name, offset)


def scratch(name: str, offset: int = 0) -> Ref:
    """A buffer of the call."""
    return Ref("scratch", name, offset)


def i32(number: int) -> Ref:
    """An int argument of 32 bits."""
    return Ref("i32", number)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is n or more."""
    return 1 << (n - 1).bit_length()
