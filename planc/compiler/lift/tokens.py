"""Rules of our own ops and of values made from nothing: attention, its mask, experts, tables, constants."""

import torch

from planc.compiler.ir.types import Attr
from planc.compiler.lift.call import Call
from planc.compiler.lift.form import Form, Mask
from planc.compiler.lift.layout import arrange, placed, regroup, spread
from planc.compiler.lift.pointwise import cast_to
from planc.compiler.lift.products import lookup


def mask(call: Call) -> Mask:
    """The mask hook's token: a kind and a size."""
    call.implied("device")
    queries, keys = call.arg("queries"), call.arg("keys")
    if (queries, keys) != ("T", "T"):
        raise call.fail(f"a mask of {queries} by {keys}, expected one of T by T")
    return Mask(call.arg("kind"), call.arg("size"))


def attention(call: Call) -> Form:
    """The attention hook's op: heads beside tokens, mask and keywords as attributes."""
    call.implied("layer")  # layers are numbered by order here, since a module may attend more than once
    if call.has("bias"):
        raise call.fail("a position bias that is added to the scores is not supported")
    kind, window = _mask(call)
    q, k, v = (call.form(name) for name in ("q", "k", "v"))
    k, v = _same_heads(call, q, k, v)
    inputs = [_heads(call, name, x) for name, x in (("q", q), ("k", k), ("v", v))]
    flags: dict[str, Attr] = {}
    for name, flag in (("sinks", "sinks"), ("slopes", "alibi")):
        if call.has(name):
            inputs.append(_by_head(call.form(name), call))
            flags[flag] = True
    attrs: dict[str, Attr] = dict(scale=float(call.arg("scale")), softcap=float(call.arg("softcap")))
    attrs |= dict(kind=kind, window=window, layer=call.builder.next_layer())
    out = call.emit("attention", *inputs, **attrs, **flags)
    return placed(out.name, out.type, call.dims, (1, 2, 3))


def _same_heads(call: Call, q: Form, k: Form, v: Form) -> tuple[Form, Form]:
    """Keys and values with as many heads as each other; repeated to the queries' number where they have not."""
    if k.dims[1] == v.dims[1] and (k.axes[1] is None) == (v.axes[1] is None):
        return k, v
    heads = max(int(x.dims[1]) for x in (k, v))  # type: ignore[arg-type]
    return _repeated(call, k, heads), _repeated(call, v, heads)


def _repeated(call: Call, x: Form, heads: int) -> Form:
    """Each head as often as it takes to have `heads`, neighbours alike."""
    own = x.dims[1]
    assert isinstance(own, int)
    if heads % own:
        raise call.fail(f"{own} heads beside {heads}")
    wide = x.pick([0, 1, None, 2, 3]).expand((x.dims[0], own, heads // own, *x.dims[2:]))
    return regroup(call, wide, (x.dims[0], heads, *x.dims[2:]))


def _by_head(form: Form, call: Call) -> str:
    """One number for each query head, [heads]."""
    return arrange(call, form, [i for i, d in enumerate(form.dims) if d != 1] or [0])


def _mask(call: Call) -> tuple[str, int]:
    found, said = call.mask("mask"), call.arg("window")
    if not call.arg("causal"):
        raise call.fail("attention that is not causal")
    if said and (found.kind, found.size) != ("sliding", said):
        raise call.fail(f"the keyword says a sliding window of {said}, the mask says {found.kind} {found.size}")
    return found.kind, found.size


def _heads(call: Call, name: str, x: Form) -> str:
    """[1, heads, T, D] as [T, heads, D]."""
    if len(x.dims) != 4 or x.dims[0] != 1 or x.dims[2] != "T" or x.axes[2] is None:
        raise call.fail(f"{name} has shape {x.dims}, expected [1, heads, T, size]")
    return arrange(call, spread(call, x, [1, 3]), (2, 1, 3))


def expert_linear(call: Call) -> Form:
    """x[T, K] or x[T, k, K] through the experts ids[T, k]."""
    x, ids, w = call.form("x"), call.form("ids"), call.form("weight")
    order = [0, 2, 1] if call.arg("transposed") else [0, 1, 2]
    x = spread(call, x, list(range(1, len(x.dims))))
    ids = spread(call, ids, [0, 1])
    inputs = [arrange(call, x, list(range(len(x.dims)))), arrange(call, ids, (0, 1)), arrange(call, w, order)]
    if call.has("bias"):
        inputs.append(arrange(call, call.form("bias"), (0, 1)))
    out = call.emit("expert_linear", *inputs, **({"bias": True} if call.has("bias") else {}))
    return placed(out.name, out.type, call.dims, (0, 1, 2))


def weighted_sum(call: Call) -> Form:
    """x[T, k, N] by weights[T, k]."""
    x, weights = call.form("x"), cast_to(call, call.form("weights"), "f32")
    weights = spread(call, weights, [0, 1])
    out = call.emit("weighted_sum", arrange(call, x, (0, 1, 2)), arrange(call, weights, (0, 1)))
    return placed(out.name, out.type, call.dims, (0, 1))


def by_position(call: Call) -> Form:
    """Rows of a table that was evaluated for every position."""
    return lookup(call, call.form("table"), call.form("positions"))


def made(call: Call) -> Form:
    """full, zeros, ones, empty, scalar_tensor: one number, expanded; what is empty is written before it is read."""
    call.implied("size", "self", "dtype", "layout", "device", "pin_memory", "memory_format")
    name = str(call.node.target)
    value = 0 if "zeros" in name or "empty" in name else 1
    if "full" in name or "fill" in name or "scalar_tensor" in name:
        value = call.arg("s" if "scalar_tensor" in name else "value" if call.has("value") else "fill_value")
    if isinstance(value, str):
        raise call.fail(f"makes a value of {value}, the number of tokens in the step")
    return call.constant(torch.full((), value, dtype=call.node.meta["val"].dtype)).expand(call.dims)


def numbers(call: Call) -> Form:
    """arange over known bounds; one over the tokens of a step is the model's own numbering of a sequence."""
    call.implied("dtype", "layout", "device", "pin_memory")
    start, end, step = call.arg("start", 0), call.arg("end"), call.arg("step", 1)
    if (start, end, step) == (0, "T", 1):
        return cast_to(call, call.tokens(), call.dtype)
    if isinstance(end, str) or isinstance(start, str):
        raise call.fail(f"numbers {start} to {end}, which says nothing of where a token stands in its sequence")
    return call.constant(torch.arange(start, end, step, dtype=call.node.meta["val"].dtype))
