"""What a node has to do: in go a node, its types and the sizes of a step, out come bytes moved and operations.

Bytes are those that any kernel must move: each input and output once, of tables the rows that are asked for, of a cache
what the step looks at.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from planc.compiler.ir.graph import Node
from planc.compiler.ir.quant import scheme
from planc.compiler.ir.types import TensorType

PRODUCTS = ("linear", "qlinear", "linear_act_mul", "qlinear_act_mul", "expert_linear", "qexpert_linear")
_UNCOUNTED = {"S1": 1, "P": 1, "M": 1}  # axes of inputs whose bytes are counted by what is read, or are few


@dataclass(frozen=True)
class Step:
    """Sizes of a step: packed tokens, sequences, rows of logits, and the tokens that each sequence looks at."""

    tokens: int
    seqs: int
    rows: int
    context: int

    @property
    def dims(self) -> Mapping[str, int]:
        return _UNCOUNTED | {"T": self.tokens, "S": self.seqs, "R": self.rows}


@dataclass(frozen=True)
class Work:
    """Bytes moved, multiplications and additions of products, and the dtype that is multiplied."""

    nbytes: float
    operations: float = 0.0
    dtype: str = "bf16"


def work(n: Node, types: Mapping[str, TensorType], step: Step) -> Work:
    """The work of a node in a step."""
    inputs = [types[i] for i in n.inputs]
    out = sum(v.type.nbytes(step.dims) for v in n.outputs)
    if n.op in ("embedding", "qembedding", "take_rows", "gather"):
        return Work(2.0 * out)
    if n.op == "kv_append":
        return Work(2.0 * sum(t.nbytes(step.dims) for t in inputs[:2]))
    if n.op == "paged_attention":
        return _attention(n, inputs, out, step)
    if n.op == "rotary_append":
        _, k, v, cos = inputs[:4]
        return Work(2.0 * (out + k.nbytes(step.dims) + v.nbytes(step.dims)) + _angles(cos, step))
    if n.op == "rotary":
        return Work(out + inputs[0].nbytes(step.dims) + _angles(inputs[1], step))
    moved = float(out + sum(t.nbytes(step.dims) for t in inputs))
    return _product(n, inputs, moved, step) if n.op in PRODUCTS else Work(moved)


def _angles(table: TensorType, step: Step) -> float:
    """Bytes of a row of each of the two tables for each token."""
    return 2.0 * step.tokens * int(table.shape[1]) * table.itemsize


def first_weight(n: Node) -> int:
    """Where a product's weight is among its inputs: after x, its scales, the experts' ids."""
    return 1 + (_act(n) is not None) + n.op.endswith("expert_linear")


def _act(n: Node) -> str | None:
    """What a product's rows are rounded to, if they are."""
    return scheme(str(n.attr("scheme"))).act if n.op.startswith("q") else None


def _product(n: Node, inputs: list[TensorType], moved: float, step: Step) -> Work:
    first = first_weight(n)
    weight = inputs[first]
    rows = prod(step.dims[d] if isinstance(d, str) else d for d in n.out.type.shape[:-1])
    if len(weight.shape) == 3:  # of a stack of experts, those that the tokens meet are read
        parts = inputs[first:]
        moved -= sum(t.nbytes(step.dims) for t in parts) * max(0.0, 1 - rows / int(weight.shape[0]))
    k = int(inputs[0].shape[-1])
    dtype = _act(n) or ("bf16" if n.op.startswith("q") else weight.dtype)  # codes alone are widened
    return Work(moved, 2.0 * rows * int(weight.shape[-2]) * k, dtype)


def _attention(n: Node, inputs: list[TensorType], out: float, step: Step) -> Work:
    heads, block, dims = (int(n.attr(a)) for a in ("heads", "block", "k_dim"))  # type: ignore[arg-type]
    dims += int(n.attr("v_dim"))  # type: ignore[arg-type]
    window = int(n.attr("window")) or step.context  # type: ignore[arg-type]
    own = step.tokens // step.seqs  # of a sequence: the last of those that it looks at
    pages = -(-min(step.context, window + own - 1) // block)
    element = {"f32": 4, "bf16": 2}.get(str(n.attr("dtype")), 1)
    position = heads * (dims * element + (8 if "k_scale_offset" in dict(n.attrs) else 0))
    moved = inputs[0].nbytes(step.dims) + out + step.seqs * pages * block * position
    return Work(moved, 2.0 * step.seqs * _seen(step.context, own, window) * int(inputs[0].shape[1]) * dims)


def _seen(last: int, own: int, window: int) -> int:
    """The sum of min(p, window) over the `own` positions up to `last`: what each of these tokens looks at."""
    first, growing = last - own + 1, min(last, window)
    rest = last - max(growing, first - 1)
    return max(0, growing - first + 1) * (first + growing) // 2 + rest * window
