"""Kernels: in goes a node with its types, out comes the kernel that runs it, or an error that lists what exists.

A kernel is a template and constants. Its name is made from all of them, so equal names are equal sources.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isinf, isnan
from typing import Any

from planc.codegen.target import Target
from planc.compiler.ir.graph import Node
from planc.compiler.ir.types import PACKED, PACKED_FOR, TensorType
from planc.errors import PlancError

Types = Sequence[TensorType]
ANY_VIEW = frozenset(range(64))  # every input may be a strided view
_NAME_LIMIT = 150  # characters; longer names end in a digest, for the sake of file systems


@dataclass(frozen=True)
class Constant:
    """A C++ declaration of a kernel's Config, and the text that stands for it in the kernel's name."""

    declaration: str
    tag: str


def integer(name: str, value: int) -> Constant:
    """`static constexpr int NAME = value`, 64 bits wide where it must be."""
    kind = "int" if abs(value) < 2**31 else "int64_t"
    return Constant(f"static constexpr {kind} {name} = {value}", f"{_short(name)}{_text(value)}")


def real(name: str, value: float) -> Constant:
    """`static constexpr float NAME = value`, written in hexadecimal so that no digit is lost."""
    return Constant(f"static constexpr float {name} = {literal(value)}", f"{_short(name)}{_text(value)}")


def literal(value: float) -> str:
    """A float constant in C++; infinities and NaN have no digits and come from the compiler."""
    if isnan(value):
        return '__builtin_nanf("")'
    if isinf(value):
        return f"{'-' if value < 0 else ''}__builtin_inff()"
    return f"float({float(value).hex()})"


def flag(name: str, value: bool) -> Constant:
    """`static constexpr bool NAME = value`."""
    return Constant(f"static constexpr bool {name} = {str(value).lower()}", f"{_short(name)}{int(value)}")


def alias(name: str, cpp: str, tag: str) -> Constant:
    """`using NAME = cpp`."""
    return Constant(f"using {name} = {cpp}", tag)


def _short(name: str) -> str:
    return name.lower().replace("_", "")


def _text(value: float | int) -> str:
    return repr(value).replace("-", "m").replace("+", "").replace(".", "p")


@dataclass(frozen=True)
class Design:
    """What a row of the table says about a node: Config constants, other template variables, parts of the name."""

    constants: tuple[Constant, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kernel:
    """A specialised kernel. Equal names have equal templates, constants and variables."""

    name: str
    op: str
    template: str
    design: Design = field(compare=False)


@dataclass(frozen=True)
class Argument:
    """A buffer that a launch passes: a value of the graph, and a byte offset into it."""

    value: str
    offset: int = 0


@dataclass(frozen=True)
class Row:
    """One row of the kernel table: the nodes of `op` that `when` accepts run in `template`.

    `says` names what it takes, for errors. `packed` are inputs that must come in their packed layout, `either` those
    that may, `views` those that may be strided views; the others must be dense. `places` gives an input as several
    buffers, each at the byte offset that an attribute holds: what differs by layer stays out of the kernel.
    """

    op: str
    template: str
    design: Callable[[Node, Types], Design]
    says: str
    when: Callable[[Node, Types], bool] = lambda node, types: True
    packed: frozenset[int] = frozenset()
    either: frozenset[int] = frozenset()
    views: frozenset[int] = frozenset()
    places: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def layout(self, index: int, t: TensorType) -> str:
        """What input `index` must be: `row` (dense), `any` (a view or a packed table will do), or a packed layout."""
        if index in self.packed:
            return PACKED_FOR[t.dtype]
        return "any" if index in self.views or index in self.either else "row"

    def takes(self, index: int, t: TensorType) -> bool:
        """True when input `index` may have the layout of `t`."""
        if index in self.packed:
            return t.layout == PACKED_FOR.get(t.dtype)
        if t.layout in PACKED:
            return index in self.either and t.layout == PACKED_FOR.get(t.dtype)
        return t.layout == "row" or index in self.views


def layouts(node: Node, types: Types, target: Target) -> tuple[str, ...]:
    """The layout that each input must have before `choose`: `row`, `any`, or a packed one such as `n64k2`.

    `types` are those of the inputs. Raises PlancError when no kernel runs the node whatever the layouts.
    """
    row = _row(node, types, target)
    return tuple(row.layout(i, t) for i, t in enumerate(types))


def choose(node: Node, types: Types, target: Target, tuned: tuple[Constant, ...] = ()) -> Kernel:
    """The kernel for a node whose inputs have `types`, its Config with what was `tuned` besides. PlancError says what
    exists for the op when none fits.
    """
    row = _row(node, types, target)
    wrong = [i for i, t in enumerate(types) if not row.takes(i, t)]
    if wrong:
        want = row.layout(wrong[0], types[wrong[0]])
        raise PlancError(
            f"{_where(node)}: input %{node.inputs[wrong[0]]}: {types[wrong[0]]} must have layout {want!r}; "
            "the select pass puts inputs into the layout that `layouts` names"
        )
    design = row.design(node, types)
    design = replace(design, constants=(*design.constants, *tuned))
    return Kernel(_name(node.op, design), node.op, row.template, design)


def arguments(node: Node, types: Types, target: Target) -> tuple[Argument, ...]:
    """The buffers of the node's kernel in order: its inputs, then its outputs."""
    row = _row(node, types, target)
    out: list[Argument] = []
    for i, name in enumerate(node.inputs):
        offsets = [node.attr(a) for a in row.places[i]] if i in row.places else [0]
        out += [Argument(name, offset) for offset in offsets if isinstance(offset, int)]
    return (*out, *(Argument(v.name) for v in node.outputs))


def _row(node: Node, types: Types, target: Target) -> Row:
    from planc.codegen.cpu_table import TABLE  # the table needs this module's types

    if target.kind != "cpu":
        raise PlancError(f"no kernels for target {target}; known kinds: cpu")
    rows = [r for r in TABLE if r.op == node.op]
    for row in rows:
        if row.when(node, types):
            return row
    have = (
        "; ".join(r.says for r in rows) or "none (ops with kernels: " + ", ".join(sorted({r.op for r in TABLE})) + ")"
    )
    raise PlancError(f"{_where(node)} has no kernel for ({', '.join(map(str, types))}); kernels of {node.op}: {have}")


def _where(node: Node) -> str:
    return f"{node.op} at {node.loc or 'top level'}"


def _name(op: str, design: Design) -> str:
    parts = [op, *design.tags, *(c.tag for c in design.constants)]
    name = re.sub(r"\W", "_", "planc_" + "_".join(p for p in parts if p))
    if len(name) <= _NAME_LIMIT:
        return name
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return f"{name[: _NAME_LIMIT - 17]}_{digest}"
