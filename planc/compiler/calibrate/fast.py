"""The costly ops by torch: in go attributes and arrays as `Op.ref` takes them, out come the same values in less time.

Calibration runs a model over thousands of tokens; the references are written to be read.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch.nn import functional as F

from planc.compiler.ir.fused import parse
from planc.compiler.ir.ops import OPS, Ref
from planc.compiler.ir.types import Attr, TensorType

Attrs = Mapping[str, Attr]
Args = Sequence[np.ndarray]
Types = Sequence[TensorType]
Out = tuple[np.ndarray, ...]
_Fn = Callable[..., torch.Tensor]

_UNARY: Mapping[str, _Fn] = {
    "neg": torch.neg, "abs": torch.abs, "exp": torch.exp, "log": torch.log, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt,
    "square": torch.square, "tanh": torch.tanh, "erf": torch.erf, "sigmoid": torch.sigmoid, "silu": F.silu,
    "relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: torch.square(F.relu(x)),
}  # fmt: skip
_BINARY: Mapping[str, _Fn] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "maximum": torch.maximum,
    "minimum": torch.minimum,
}  # fmt: skip


def ref(op: str) -> Ref:
    """What computes an op here: torch where it is worth it, else the op's reference."""
    return _FAST.get(op) or OPS[op].ref


def _torch(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _unary(fn: _Fn) -> Ref:
    return lambda attrs, args, types: (fn(_torch(args[0])).numpy(),)


def _gelu(attrs: Attrs, args: Args, types: Types) -> Out:
    return (_UNARY["gelu_tanh" if attrs["tanh"] else "gelu"](_torch(args[0])).numpy(),)


def _act_mul(attrs: Attrs, args: Args, types: Types) -> Out:
    return ((_UNARY[str(attrs["act"])](_torch(args[0])) * _torch(args[1])).numpy(),)


def _linear(attrs: Attrs, args: Args, types: Types) -> Out:
    bias = _torch(args[2]) if attrs.get("bias") else None
    return (F.linear(_torch(args[0]), _torch(args[1]), bias).numpy(),)


def _rms_norm(attrs: Attrs, args: Args, types: Types) -> Out:
    x = _torch(args[0])
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + attrs["eps"])
    return ((y * _torch(args[1]) if len(args) > 1 else y).numpy(),)


def _add_rms_norm(attrs: Attrs, args: Args, types: Types) -> Out:
    total = args[0] + args[1]
    return (*_rms_norm(attrs, (total, *args[2:]), types), total)


def _fused(attrs: Attrs, args: Args, types: Types) -> Out:
    statements = parse(str(attrs["code"]))
    if any(s.op not in _UNARY and s.op not in _BINARY for s in statements):
        return OPS["fused"].ref(attrs, args, types)
    values = {f"i{n}": _torch(a) for n, a in enumerate(args)}
    for n, s in enumerate(statements):
        given = [values[a] if isinstance(a, str) else torch.tensor(a, dtype=torch.float32) for a in s.args]
        values[f"t{n}"] = result = (_UNARY.get(s.op) or _BINARY[s.op])(*given)
    shape = np.broadcast_shapes(*(a.shape for a in args))
    return (result.broadcast_to(shape).contiguous().numpy(),)


def _attention(attrs: Attrs, args: Args, types: Types) -> Out:
    """All tokens are one sequence: q[T, Hq, D] over k[T, Hk, D], v[T, Hk, Dv]."""
    q, k, v = (_torch(a).transpose(0, 1) for a in args[:3])
    k, v = (t.repeat_interleave(q.shape[0] // t.shape[0], dim=0) for t in (k, v))
    scores = torch.bmm(q, k.transpose(1, 2)) * float(attrs["scale"])  # type: ignore[arg-type]
    cap = float(attrs["softcap"])  # type: ignore[arg-type]
    if cap:
        scores = cap * torch.tanh(scores / cap)
    at = torch.arange(q.shape[1])
    sinks, slopes = bool(attrs.get("sinks")), bool(attrs.get("alibi"))
    if slopes:
        scores += _torch(args[3 + sinks])[:, None, None] * (at[None] - at[:, None])
    scores.masked_fill_(~_visible(attrs, at), -torch.inf)
    if sinks:
        scores = torch.cat([scores, _torch(args[3])[:, None, None].expand(-1, q.shape[1], 1)], dim=-1)
    p = scores.softmax(-1)[..., : q.shape[1]]
    return (torch.bmm(p, v).transpose(0, 1).contiguous().numpy(),)


def _visible(attrs: Attrs, at: torch.Tensor) -> torch.Tensor:
    """[queries, keys]: which keys a query sees."""
    window = int(attrs["window"])  # type: ignore[arg-type]
    seen = at[None] <= at[:, None]
    if attrs["kind"] == "sliding":
        seen &= at[None] > at[:, None] - window
    if attrs["kind"] == "chunked":
        seen &= at[None] // window == at[:, None] // window
    return seen


_FAST: Mapping[str, Ref] = {
    **{name: _unary(fn) for name, fn in _UNARY.items() if name in OPS and name != "gelu"},
    "gelu": _gelu,
    "act_mul": _act_mul,
    "linear": _linear,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "fused": _fused,
    "attention": _attention,
}
