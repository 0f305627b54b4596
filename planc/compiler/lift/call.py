"""One node of the trace while it is lifted: in go its arguments, out come forms, ops and errors with a place.

Every argument that is given and differs from its default must be read by the rule; `unread` names the first that was
not, so a rule cannot drop a bias or an alpha in silence.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from planc.compiler.ir.graph import Value
from planc.compiler.ir.types import DTYPES as NUMPY
from planc.compiler.ir.types import Attr, Dim, TensorType
from planc.compiler.lift.builder import Builder
from planc.compiler.lift.form import Complex, Form, Mask
from planc.compiler.refusal import refused
from planc.compiler.traced import module_path, source_line, target_name
from planc.errors import PlancError

Lift = Form | Mask | Complex | tuple[Form | Complex, ...]

DTYPES = {
    torch.float32: "f32",
    torch.float64: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i32",  # token counts, ids and positions all fit
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "f32",  # truth is 1.0 or 0.0
    torch.complex64: "f32",  # each of its parts
}
_OWN_NAME = frozenset({"linear", "embedding", "layer_norm", "rms_norm"})  # named after their module alone


class Call:
    """`node` with its arguments by name, the forms of its operands, and the builder that its rule emits into."""

    def __init__(
        self, node: fx.Node, env: Mapping[fx.Node, Lift], builder: Builder, symbols: Mapping[str, str]
    ) -> None:
        self.node, self.builder = node, builder
        self._env, self._symbols = env, symbols
        self._schema = node.target._schema.arguments if isinstance(node.target, torch._ops.OpOverload) else ()
        names = [a.name for a in self._schema]
        self._args: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        self._read: set[str] = set()

    # ---- what is asked of the node

    @property
    def dims(self) -> tuple[Dim, ...]:
        """The result's shape in ints and symbols."""
        return self.dims_of(self.node.meta["val"])

    def dims_of(self, value: torch.Tensor) -> tuple[Dim, ...]:
        """A traced tensor's shape in ints and symbols."""
        return self._dims(value.shape)

    @property
    def merges(self) -> bool:
        """Whether the result or a tensor argument merges tokens with another axis, [4 T, ..], kept apart here."""
        nodes = (self.node, *self.node.all_input_nodes)
        values = (n.meta["val"] for n in nodes)
        return any(_factor(d, self._symbols) for v in values if isinstance(v, torch.Tensor) for d in v.shape)

    @property
    def dtype(self) -> str:
        """The result's dtype, as the graph names it."""
        return self.dtype_of(self.node)

    def dtype_of(self, node: fx.Node) -> str:
        """The dtype of a node of the trace, as the graph names it."""
        dtype = node.meta["val"].dtype
        if dtype not in DTYPES:
            raise self.fail(f"dtype {dtype} has no counterpart; known: {', '.join(sorted(set(DTYPES.values())))}")
        return DTYPES[dtype]

    @property
    def is_truth(self) -> bool:
        """Whether the result is a tensor of booleans."""
        return bool(self.node.meta["val"].dtype == torch.bool)

    def truth(self, name: str) -> bool:
        """Whether a tensor argument is one of booleans."""
        node = self.source(name)
        return node is not None and node.meta["val"].dtype == torch.bool

    def arg(self, name: str, default: Any = None) -> Any:
        """An argument that is no tensor; sizes come as ints and symbols."""
        self._read.add(name)
        value = self._args.get(name, default)
        return self._size(value) if isinstance(value, (fx.Node, torch.SymInt)) else value

    def sizes(self, name: str) -> list[Dim]:
        """A list of sizes, as ints and symbols."""
        return [self._size(d) for d in self.arg(name)]

    def implied(self, *names: str) -> None:
        """Says that the result's shape and dtype hold all that these arguments ask for."""
        self._read.update(names)

    def has(self, name: str) -> bool:
        """Whether the argument is given and not None."""
        return self._args.get(name) is not None

    def form(self, name: str) -> Form:
        """The form of a tensor argument."""
        value = self.operand(name)
        if not isinstance(value, Form):
            raise self.fail(f"argument {name} is {value!r}, not a tensor")
        if 0 in value.dims:
            raise self.fail(f"argument {name} is empty: {value.dims}")
        return value

    def operand(self, name: str) -> Form | int | float:
        """The form of a tensor argument, or the number in its place."""
        self._read.add(name)
        return self._operand(self._args.get(name), name)

    def forms(self, name: str) -> list[Form]:
        """The forms of an argument that lists tensors."""
        self._read.add(name)
        found = [self._operand(v, name) for v in self._args[name]]
        return [f if isinstance(f, Form) else self._not_tensor(name) for f in found]

    def mask(self, name: str) -> Mask:
        """An argument that must be a mask of the mask hook."""
        self._read.add(name)
        value = self._env.get(self._args.get(name))  # type: ignore[arg-type]
        if not isinstance(value, Mask):
            raise self.fail(f"argument {name} is not a mask that the model asked transformers for")
        return value

    def complex(self, name: str) -> Complex | None:
        """A tensor argument that is complex; None when it is not."""
        value = self._args.get(name)
        found = self._env.get(value) if isinstance(value, fx.Node) else None
        if not isinstance(found, Complex):
            return None
        self._read.add(name)
        return found

    def source(self, name: str) -> fx.Node | None:
        """The node of the trace that makes an argument."""
        value = self._args.get(name)
        return value if isinstance(value, fx.Node) else None

    def lifted(self, node: fx.Node) -> Form:
        """The form of another node of the trace, already lifted."""
        form = self._env[node]
        assert isinstance(form, Form)
        return form

    @property
    def unread(self) -> str | None:
        """The first argument that matters and that no one asked for."""
        for a in self._schema:
            given = a.name in self._args and self._args[a.name] is not None
            if given and a.name not in self._read and not _is_default(a, self._args[a.name]):
                return a.name
        return None

    # ---- what the rule says

    def emit(self, op: str, *inputs: str, **attrs: Attr) -> Value:
        """The output of a new graph node (a weight, when bytes of weights move)."""
        (out,) = self.emit_many(op, *inputs, **attrs)
        return out

    def emit_many(self, op: str, *inputs: str, **attrs: Attr) -> tuple[Value, ...]:
        """Like `emit`, for an op of several outputs."""
        stem = short_name(self.path)
        name = stem if op in _OWN_NAME and stem else f"{stem}.{op}".lstrip(".")
        try:
            return self.builder.emit(op, inputs, name, self.path, **attrs)
        except (ValueError, KeyError, TypeError) as e:
            raise self.fail(str(e)) from e

    def constant(self, value: torch.Tensor) -> Form:
        """A tensor that the compiler knows."""
        made = self.builder.constant(f"{short_name(self.path)}.const".lstrip("."), array_of(value))
        return Form.known(made.name, made.type, value)

    def known(self, form: Form) -> list[int] | None:
        """The elements of a vector of integers that the compiler knows; negative ones count from the end."""
        array = self.builder.array(form.name)
        if array is None or array.dtype.kind != "i" or len(form.dims) != 1:
            return None
        return [int(i) for i in array.reshape(-1)]

    def evaluated(self) -> Form | None:
        """The result when every operand is a number that the compiler knows: torch itself computes it."""
        values: dict[fx.Node, torch.Tensor] = {}
        for node in self.node.all_input_nodes:
            form = self._env.get(node)
            array = self.builder.array(form.name) if isinstance(form, Form) else None
            if array is None or array.size != 1 or not isinstance(node.meta["val"], torch.Tensor):
                return None
            if node.meta["val"].numel() != 1:
                return None
            values[node] = torch.from_numpy(array).reshape(node.meta["val"].shape).to(node.meta["val"].dtype)
        if not values:
            return None
        args, kwargs = fx.node.map_arg((self.node.args, self.node.kwargs), values.__getitem__)  # type: ignore[misc]
        return self.constant(self.node.target(*args, **kwargs))  # type: ignore[operator]

    def tokens(self) -> Form:
        """Where each token stands in its sequence, [T]: what a model's own numbering of its tokens means."""
        self.builder.numbered = True
        return Form.plain("positions", self.builder.types["positions"])

    def type_of(self, name: str) -> TensorType:
        """Type of a graph value."""
        return self.builder.types[name]

    def fail(self, why: str) -> PlancError:
        """The error to raise: op, module path and source line of this node, then `why`."""
        return refused(f"{target_name(self.node)} in {self.path or 'top level'} ({source_line(self.node)}): {why}")

    @property
    def path(self) -> str:
        """Path of the module that the node came from."""
        return module_path(self.node)

    # ----

    def _not_tensor(self, name: str) -> Form:
        raise self.fail(f"argument {name} lists something that is no tensor")

    def _operand(self, value: Any, name: str) -> Form | int | float:
        if isinstance(value, fx.Node):
            found = self._env.get(value)
            if isinstance(found, Mask):
                raise self.fail("the model computes with an attention mask, which is known by kind only")
            if isinstance(found, Form):
                return found
            raise self.fail(f"argument {name} is a size of this step, not a tensor or a number")
        if isinstance(value, (bool, int, float)):
            return value
        raise self.fail(f"argument {name} is {value!r}, expected a tensor or a number")

    def _dims(self, shape: Sequence[Any]) -> tuple[Dim, ...]:
        out: list[Dim] = []
        for d in shape:
            factor = _factor(d, self._symbols)
            if factor:
                out += [factor, "T"] if self._before_tokens(factor, first=not out) else ["T", factor]
            else:
                out.append(self._size(d))
        return tuple(out)

    def _before_tokens(self, factor: int, first: bool) -> bool:
        """Whether the axis that is merged with the tokens lies outside of theirs, as what it came from tells."""
        if "repeat_interleave" in str(self.node.target):
            return False
        if "repeat" in str(self.node.target):
            return True
        for node in self.node.all_input_nodes:
            form = self._env.get(node)
            if isinstance(form, Form) and "T" in form.dims:
                at = form.dims.index("T")
                before = at > 0 and form.dims[at - 1] == factor
                after = form.dims[at + 1 : at + 2] == (factor,)
                if before or after:
                    return before and (first or not after)
        raise self.fail(f"{factor} times the tokens, merged in an order that nothing tells")

    def _size(self, value: Any) -> Dim:
        value = value.meta["val"] if isinstance(value, fx.Node) else value
        if isinstance(value, int):
            return value
        name = str(value)
        if name not in self._symbols:
            known = {s: d for s, d in self._symbols.items()}
            text = re.sub(r"\w+", lambda m: known.get(m[0], m[0]), name)
            raise self.fail(f"a size of {text} merges tokens with something else, which no packed step can hold")
        return self._symbols[name]


def _factor(size: Any, symbols: Mapping[str, str]) -> int:
    """k of a size k T, 0 of any other."""
    found = re.fullmatch(r"(\d+)\*(\w+)", str(size)) if isinstance(size, torch.SymInt) else None
    return int(found[1]) if found and symbols.get(found[2]) == "T" else 0


def _is_default(argument: Any, value: Any) -> bool:
    return bool(argument.has_default_value()) and bool(argument.default_value == value)


def array_of(value: torch.Tensor) -> np.ndarray:
    """A known tensor as the graph holds it; its dtype must be one of DTYPES. numpy alone has no bf16."""
    dtype = NUMPY[DTYPES[value.dtype]]
    value = value.detach()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy().astype(dtype)


def short_name(path: str) -> str:
    """A module path for use in names: `model.layers.3.self_attn.q_proj` becomes `l3.self_attn.q_proj`."""
    parts = path.split(".") if path else []
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join([f"l{part}", *parts[i + 1 :]])
    return ".".join(parts[1:] if len(parts) > 1 else parts)
