"""Rules of products, norms, reductions and lookups: in goes a call, out comes the op with weights laid out for it."""

import torch
from torch import fx

from planc.compiler.ir.types import Dim
from planc.compiler.lift.call import Call
from planc.compiler.lift.form import Form
from planc.compiler.lift.layout import arrange, feature_order, placed, rows_first, spread
from planc.compiler.lift.pointwise import pair
from planc.compiler.lift.rows import take
from planc.compiler.lift.views import join, narrow


def linear(call: Call) -> Form:
    """x[..., K] @ w[N, K].T + b."""
    return _linear(call, call.form("input"), call.form("weight"), "bias", call.dims)


def addmm(call: Call) -> Form:
    """b + x[T, K] @ w[K, N]."""
    return _linear(call, call.form("mat1"), call.form("mat2").pick([1, 0]), "self", call.dims)


def matmul(call: Call) -> Form:
    """x[..., K] @ w[K, N] with a weight, an outer product (K = 1), a weight for each head, or two activations."""
    a, b = call.form("self"), call.form("mat2" if call.has("mat2") else "other")
    return product(call, a, b, call.dims)


def baddbmm(call: Call) -> Form:
    """beta c + alpha (a @ b)."""
    a, b = call.form("batch1"), call.form("batch2")
    scaled = pair(call, "mul", product(call, a, b, call.dims), call.arg("alpha", 1))
    return pair(call, "add", scaled, pair(call, "mul", call.form("self"), call.arg("beta", 1)))


def product(call: Call, a: Form, b: Form, dims: tuple[Dim, ...]) -> Form:
    """a @ b, of shape `dims`."""
    if len(b.dims) == 1:
        return _without(product(call, a, b.pick([0, None]), (*dims, 1)), -1)
    if len(a.dims) == 1:
        return _without(product(call, a.pick([None, 0]), b, (*dims[:-1], 1, dims[-1])), -2)
    if isinstance(a.dims[-1], str):
        raise call.fail(f"{a.dims} by {b.dims} sums over tokens outside of attention")
    if a.dims[-1] == 1 and len(a.dims) == len(b.dims):
        return pair(call, "mul", a, b)
    if b.dims[-1] == "T" and a.dims[-2] != "T":
        return _swap(product(call, _swap(b), _swap(a), _swapped(dims)))
    batch = [i - len(b.dims) for i in b.stored if i < len(b.dims) - 2]
    if not b.has_rows and not batch:
        return _linear(call, a, _swap(b).pick([len(b.dims) - 2, len(b.dims) - 1]), None, dims)
    if not b.has_rows and len(batch) == 1 and a.has_rows:
        return _each_head(call, a, b, batch[0], dims)
    return _activations(call, a, b, dims)


def _without(x: Form, axis: int) -> Form:
    """The tensor without an axis of size 1."""
    return x.pick([i for i in range(len(x.dims)) if i != axis % len(x.dims)])


def _swap(x: Form) -> Form:
    rank = len(x.dims)
    return x.pick([*range(rank - 2), rank - 1, rank - 2])


def _swapped(dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
    return (*dims[:-2], dims[-1], dims[-2])


def _each_head(call: Call, a: Form, b: Form, axis: int, dims: tuple[Dim, ...]) -> Form:
    """a[.., h, .., K] @ w[h, K, N], a matrix for each place along one axis: experts that are always the same."""
    rank = len(dims)
    a = spread(call, a.expand((*dims[:-1], a.dims[-1])), [rank + axis, rank - 1])
    order = [i for i in range(rank) if a.axes[i] is not None]
    if len(order) != 3 or isinstance(b.dims[axis], str):
        return _activations(call, a, b, dims)
    token = next(i for i in order if isinstance(dims[i], str))
    order = [token, rank + axis, rank - 1]
    w = arrange(call, b, [len(b.dims) + axis, len(b.dims) - 1, len(b.dims) - 2])
    ids = call.constant(torch.arange(int(b.dims[axis])))
    out = call.emit("expert_linear", arrange(call, a, order), ids.name, w)
    return placed(out.name, out.type, dims, order)


def _activations(call: Call, a: Form, b: Form, dims: tuple[Dim, ...]) -> Form:
    """Two activations: leading axes beside each other, tokens first."""
    rank = len(dims)
    a, b = a.expand((*dims[:-2], *a.dims[-2:])), b.expand((*dims[:-2], *b.dims[-2:]))
    if any(isinstance(d, str) for d in (*a.dims[-2:], *b.dims[-2:])):
        raise call.fail(f"{a.dims} by {b.dims} multiplies tokens with tokens outside of attention")
    a, b = spread(call, a, [rank - 2, rank - 1]), spread(call, b, [rank - 2, rank - 1])
    lead = rows_first(dims, sorted({i for x in (a, b) for i in x.stored if i < rank - 2}))
    order = [*lead, rank - 2, rank - 1]
    out = call.emit("matmul", arrange(call, a, order), arrange(call, b, order))
    return placed(out.name, out.type, dims, order)


def _linear(call: Call, x: Form, w: Form, bias: str | None, dims: tuple[Dim, ...]) -> Form:
    if w.has_rows or len(w.dims) != 2:
        raise call.fail(f"a weight of shape {w.dims}, expected a matrix that does not depend on tokens")
    x, w = spread(call, x, [len(x.dims) - 1]), spread(call, w, [0, 1])
    order = feature_order(x, last=len(x.dims) - 1)
    inputs = [arrange(call, x, order), arrange(call, w, (0, 1))]
    if bias is not None and call.has(bias):
        inputs.append(_vector(call, bias))
    out = call.emit("linear", *inputs, **({"bias": True} if len(inputs) == 3 else {}))
    return placed(out.name, out.type, dims, [i - len(x.dims) + len(dims) for i in order])


def _vector(call: Call, name: str) -> str:
    form = call.form(name)
    if len(form.dims) != 1 or form.has_rows:
        raise call.fail(f"{name} of shape {form.dims}, expected a vector that does not depend on tokens")
    return arrange(call, spread(call, form, [0]), (0,))


def layer_norm(call: Call) -> Form:
    """Layer norm over the last axis, with or without weight and bias."""
    call.implied("cudnn_enable")
    return _norm(call, "layer_norm", float(call.arg("eps", 1e-5)))


def rms_norm(call: Call) -> Form:
    """RMS norm over the last axis, with or without weight; torch's default eps is that of the dtype."""
    eps = call.arg("eps")
    return _norm(call, "rms_norm", 2.0**-23 if eps is None else float(eps))


def _norm(call: Call, op: str, eps: float) -> Form:
    x = call.form("input")
    if len(call.arg("normalized_shape")) != 1:
        raise call.fail(f"normalises over {call.arg('normalized_shape')}, expected the last axis alone")
    last = len(x.dims) - 1
    x, order = spread(call, x, [last]), feature_order(x, last=last)
    inputs = [arrange(call, x, order)] + [_vector(call, n) for n in ("weight", "bias") if call.has(n)]
    out = call.emit(op, *inputs, eps=eps, **({"bias": True} if call.has("bias") else {}))
    return placed(out.name, out.type, x.dims, order)


def embedding(call: Call) -> Form:
    """Rows of a table by ids."""
    call.implied("padding_idx", "scale_grad_by_freq", "sparse")
    return lookup(call, call.form("weight"), call.form("indices"))


def index(call: Call) -> Form:
    """x[:, rows] takes the wanted rows; table[positions] looks rows up; x[.., [2]] picks known places."""
    x = call.form("self")
    places = call.node.args[1]
    found = [(axis, n) for axis, n in enumerate(places) if n is not None]  # type: ignore[arg-type, union-attr]
    call.implied("indices")
    if len(found) == 2 and (one := _own_tokens(call, x, found)):
        return one
    if len(found) != 1:
        raise call.fail(f"indexes {len(found)} axes at once, expected one")
    axis, node = found[0]
    return _take(call, x, axis, call.lifted(node))


def index_select(call: Call) -> Form:
    """Like index, by axis."""
    x = call.form("self")
    return _take(call, x, call.arg("dim") % len(x.dims), call.form("index"))


def _own_tokens(call: Call, x: Form, found: list[tuple[int, fx.Node]]) -> Form | None:
    """x[arange(T)[:, None], ids], which is each token's own row: a gather along the other axis."""
    (rows, numbers), (axis, ids) = ((a, call.lifted(n)) for a, n in found)
    if (rows, axis) != (0, 1) or x.dims[0] != "T" or len(x.dims) != 2 or numbers.name != "positions":
        return None
    return take(call, x, ids.expand(call.dims), 1)


def _take(call: Call, x: Form, axis: int, rows: Form) -> Form:
    if x.dims[axis] == "T" and rows.dims == ("R",) and x.has_rows:
        out = call.emit("take_rows", x.name, rows.name)
        return Form.of(out.name, out.type, call.dims, x.axes)
    if axis == 0 and not x.has_rows and rows.has_rows:
        return lookup(call, x, rows)
    places, size = call.known(rows), x.dims[axis]
    if places and isinstance(size, int):
        return join(call, [narrow(call, x, axis, i % size, i % size + 1) for i in places], axis)
    raise call.fail(f"takes {rows.dims} of axis {axis} of {x.dims}, expected the wanted rows or a lookup by token")


def lookup(call: Call, table: Form, ids: Form) -> Form:
    """table[ids], ids one for each token."""
    if table.has_rows or not ids.has_rows or len(ids.stored) != 1:
        raise call.fail(f"looks {ids.dims} up in {table.dims}, expected one id for each token and a table of weights")
    order = [*range(len(table.dims))]
    out = call.emit("embedding", arrange(call, spread(call, table, order), order), arrange(call, ids, ids.stored))
    lead = len(ids.dims)
    return placed(out.name, out.type, call.dims, [ids.stored[0], *range(lead, lead + len(order) - 1)])
