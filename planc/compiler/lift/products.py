"""Rules of products, norms, reductions and lookups: in goes a call, out comes the op with weights laid out for it."""

from collections.abc import Callable

from planc.compiler.lift.call import Call
from planc.compiler.lift.form import Form
from planc.compiler.lift.layout import arrange, feature_order, placed
from planc.compiler.lift.pointwise import combine

Rule = Callable[[Call], Form]


def linear(call: Call) -> Form:
    """x[..., K] @ w[N, K].T + b."""
    return _linear(call, call.form("input"), call.form("weight"), "bias")


def addmm(call: Call) -> Form:
    """b + x[T, K] @ w[K, N]."""
    return _linear(call, call.form("mat1"), call.form("mat2").pick([1, 0]), "self")


def matmul(call: Call) -> Form:
    """x[..., K] @ w[K, N] with a weight, or an outer product (K = 1)."""
    a, b = call.form("self"), call.form("mat2" if call.has("mat2") else "other")
    if a.dims[-1] == 1 and len(a.dims) == len(b.dims):
        return combine(call, "mul", a, b)
    if b.has_rows or len(b.stored) != 2 or len(b.dims) < 2:
        raise call.fail(f"{a.dims} by {b.dims}: only products with a weight matrix are supported outside attention")
    order: list[int | None] = [len(b.dims) - 1, len(b.dims) - 2]
    return _linear(call, a, b.pick(order), None)


def _linear(call: Call, x: Form, w: Form, bias: str | None) -> Form:
    if w.has_rows or len(w.dims) != 2:
        raise call.fail(f"a weight of shape {w.dims}, expected a matrix that does not depend on tokens")
    order = feature_order(x, last=len(x.dims) - 1)
    inputs = [arrange(call, x, order), arrange(call, w, (0, 1))]
    if bias is not None and call.has(bias):
        inputs.append(_vector(call, bias))
    out = call.emit("linear", *inputs, **({"bias": True} if len(inputs) == 3 else {}))
    return placed(out.name, out.type, call.dims, order)


def _vector(call: Call, name: str) -> str:
    form = call.form(name)
    if len(form.dims) != 1 or form.has_rows:
        raise call.fail(f"{name} of shape {form.dims}, expected a vector that does not depend on tokens")
    return arrange(call, form, (0,))


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
    order = feature_order(x, last=len(x.dims) - 1)
    inputs = [arrange(call, x, order)] + [_vector(call, n) for n in ("weight", "bias") if call.has(n)]
    out = call.emit(op, *inputs, eps=eps, **({"bias": True} if call.has("bias") else {}))
    return placed(out.name, out.type, x.dims, order)


def reduction(op: str) -> Rule:
    """A rule for a reduction over one axis of features."""

    def rule(call: Call) -> Form:
        x, dim = call.form("self"), call.arg("dim")
        axes = [d % len(x.dims) for d in ([dim] if isinstance(dim, int) else dim or [])]
        if len(axes) != 1 or x.axes[axes[0]] is None or isinstance(x.dims[axes[0]], str):
            raise call.fail(f"reduces axes {dim} of {x.dims}, expected one axis of features")
        order = feature_order(x, last=axes[0])
        out = call.emit(op, arrange(call, x, order))
        dims = tuple(1 if i == axes[0] else d for i, d in enumerate(x.dims))
        made = placed(out.name, out.type, dims, order)
        return made if call.arg("keepdim", False) else made.pick([i for i in range(len(dims)) if i != axes[0]])

    return rule


def embedding(call: Call) -> Form:
    """Rows of a table by ids."""
    call.implied("padding_idx", "scale_grad_by_freq", "sparse")
    return lookup(call, call.form("weight"), call.form("indices"))


def index(call: Call) -> Form:
    """x[:, rows] takes the wanted rows; table[positions] looks rows up."""
    x = call.form("self")
    places = call.node.args[1]
    found = [(axis, n) for axis, n in enumerate(places) if n is not None]  # type: ignore[arg-type, union-attr]
    call.implied("indices")
    if len(found) != 1:
        raise call.fail(f"indexes {len(found)} axes at once, expected one")
    axis, node = found[0]
    return _take(call, x, axis, call.lifted(node))


def index_select(call: Call) -> Form:
    """Like index, by axis."""
    x = call.form("self")
    return _take(call, x, call.arg("dim") % len(x.dims), call.form("index"))


def _take(call: Call, x: Form, axis: int, rows: Form) -> Form:
    if x.dims[axis] == "T" and rows.dims == ("R",) and x.has_rows:
        out = call.emit("take_rows", x.name, rows.name)
        return Form.of(out.name, out.type, call.dims, x.axes)
    if axis == 0 and not x.has_rows and rows.has_rows:
        return lookup(call, x, rows)
    raise call.fail(f"takes {rows.dims} of axis {axis} of {x.dims}, expected the wanted rows or a lookup by token")


def lookup(call: Call, table: Form, ids: Form) -> Form:
    """table[ids], ids one for each token."""
    if table.has_rows or not ids.has_rows or len(ids.stored) != 1:
        raise call.fail(f"looks {ids.dims} up in {table.dims}, expected one id for each token and a table of weights")
    order = [*range(len(table.dims))]
    out = call.emit("embedding", arrange(call, table, order), arrange(call, ids, ids.stored))
    lead = len(ids.dims)
    return placed(out.name, out.type, call.dims, [ids.stored[0], *range(lead, lead + len(order) - 1)])
