"""Rules of what mixes or numbers tokens, and of values made from nothing: attention, its mask, constants."""

import torch

from planc.compiler.ir.types import Attr
from planc.compiler.lift.call import Call, array_of, short_name
from planc.compiler.lift.form import Form, Mask
from planc.compiler.lift.layout import arrange, placed


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
    inputs = [_heads(call, name) for name in ("q", "k", "v")]
    if call.has("sinks"):
        inputs.append(_sinks(call.form("sinks"), call))
    attrs: dict[str, Attr] = dict(scale=float(call.arg("scale")), softcap=float(call.arg("softcap")))
    attrs |= dict(kind=kind, window=window, layer=call.builder.next_layer())
    out = call.emit("attention", *inputs, **attrs, **({"sinks": True} if call.has("sinks") else {}))
    return placed(out.name, out.type, call.dims, (1, 2, 3))


def _sinks(sinks: Form, call: Call) -> str:
    """One number for each query head, [heads]."""
    return arrange(call, sinks, [i for i, d in enumerate(sinks.dims) if d != 1] or [0])


def _mask(call: Call) -> tuple[str, int]:
    found, said = call.mask("mask"), call.arg("window")
    if not call.arg("causal"):
        raise call.fail("attention that is not causal")
    if said and (found.kind, found.size) != ("sliding", said):
        raise call.fail(f"the keyword says a sliding window of {said}, the mask says {found.kind} {found.size}")
    return found.kind, found.size


def _heads(call: Call, name: str) -> str:
    """[1, heads, T, D] as [T, heads, D]."""
    x = call.form(name)
    if len(x.dims) != 4 or x.dims[0] != 1 or x.dims[2] != "T" or x.axes[2] is None:
        raise call.fail(f"{name} has shape {x.dims}, expected [1, heads, T, size]")
    return arrange(call, x, (2, 1, 3))


def made(call: Call) -> Form:
    """full, zeros, ones, scalar_tensor: one number, expanded."""
    call.implied("size", "self", "dtype", "layout", "device", "pin_memory", "memory_format")
    name = str(call.node.target)
    value = (
        0 if "zeros" in name else 1 if "ones" in name else call.arg("s" if "scalar_tensor" in name else "fill_value")
    )
    return _constant(call, torch.full((), value, dtype=call.node.meta["val"].dtype)).expand(call.dims)


def numbers(call: Call) -> Form:
    """arange over known bounds; one over the tokens of a step says nothing of where they stand in their sequences."""
    call.implied("dtype", "layout", "device", "pin_memory")
    start, end, step = call.arg("start", 0), call.arg("end"), call.arg("step", 1)
    if isinstance(end, str) or isinstance(start, str):
        raise call.fail(
            "numbers tokens by where they lie in the step; with several sequences only position_ids tells where"
        )
    return _constant(call, torch.arange(start, end, step, dtype=call.node.meta["val"].dtype))


def _constant(call: Call, value: torch.Tensor) -> Form:
    made = call.builder.constant(f"{short_name(call.path)}.const".lstrip("."), array_of(value))
    return Form.known(made.name, made.type, value)
