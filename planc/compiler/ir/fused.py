"""The code of a `fused` op: in goes its text, out come statements, their type rule and their numpy reference.

Statements are joined by ";", each `op(arg,..)`: an argument is an input (i0, i1, ..), an earlier statement (t0, ..)
or a number. The last statement is the result.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from planc.compiler.ir.refs import ACTS, BINARY, COMPARE, UNARY, Array, Attrs, Out, Types
from planc.compiler.ir.types import Attr, TensorType

# Op -> how many arguments it takes.
ARITY: Mapping[str, int] = {
    **dict.fromkeys(UNARY, 1),
    "gelu": 1,
    "gelu_tanh": 1,
    **dict.fromkeys((*BINARY, *COMPARE), 2),
    "where": 3,
}
Arg = str | float  # "i0", "t3" or a number


@dataclass(frozen=True)
class Statement:
    """One operation of the chain."""

    op: str
    args: tuple[Arg, ...]

    def __str__(self) -> str:
        return f"{self.op}({','.join(a if isinstance(a, str) else repr(a) for a in self.args)})"


@lru_cache(maxsize=1024)
def parse(code: str) -> tuple[Statement, ...]:
    """The statements of `code`; ValueError names the one that is not understood."""
    out: list[Statement] = []
    for text in code.split(";"):
        m = re.fullmatch(r"(\w+)\(([^()]*)\)", text)
        if not m or ARITY.get(m[1]) != len(m[2].split(",")):
            raise ValueError(f"fused: {text!r} is no call of a pointwise op; known: {', '.join(ARITY)}")
        out.append(Statement(m[1], tuple(_arg(a, text, len(out)) for a in m[2].split(","))))
    return tuple(out)


def _arg(text: str, statement: str, at: int) -> Arg:
    if re.fullmatch(r"i\d+", text) or (re.fullmatch(r"t\d+", text) and int(text[1:]) < at):
        return text
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"fused: {text!r} in {statement!r} is no input, earlier statement or number") from None


def render(statements: Sequence[Statement]) -> str:
    """The text that parses to `statements`."""
    return ";".join(map(str, statements))


def infer(attrs: Mapping[str, Attr], types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """Float32 inputs that broadcast, each read by the code."""
    from planc.compiler.ir.infer import broadcast, want

    read = {a for s in parse(str(attrs["code"])) for a in s.args if isinstance(a, str) and a.startswith("i")}
    want(read == {f"i{n}" for n in range(len(types))}, f"fused: the code reads {sorted(read)} of {len(types)} inputs")
    want(all(t.dtype == "f32" for t in types), f"fused: inputs must be f32, got {', '.join(map(str, types))}")
    return (TensorType("f32", broadcast(*(t.shape for t in types))),)


def fused(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    values: dict[str, Array] = {f"i{n}": a for n, a in enumerate(args)}
    dtype = args[0].dtype
    shape = np.broadcast_shapes(*(a.shape for a in args))
    for n, s in enumerate(parse(str(attrs["code"]))):
        given = [values[a] if isinstance(a, str) else np.asarray(a, dtype) for a in s.args]
        values[f"t{n}"] = result = np.asarray(_apply(s.op, given), dtype)
    return (np.ascontiguousarray(np.broadcast_to(result, shape)),)


def _apply(op: str, given: Sequence[Array]) -> Array:
    if op == "where":
        return np.where(given[0] != 0, given[1], given[2])
    fn = UNARY.get(op) or ACTS.get(op)
    if fn:
        return fn(given[0])
    return (BINARY.get(op) or COMPARE[op])(given[0], given[1])
