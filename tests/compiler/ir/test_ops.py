"""Op references against torch in float64, and inferred types against what the references make."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from samples import Sample, samples

from planc.compiler.ir import gated, rounded
from planc.compiler.ir.ops import OPS
from planc.compiler.ir.packing import unpack
from planc.compiler.ir.quant import SCHEMES
from planc.compiler.ir.types import PACKED, dtype_name

ALL = list(samples())
CACHE_OPS = {"kv_append", "rotary_append", "paged_attention"}  # tested in test_paged.py, passes/test_fuse_append.py


def run(s: Sample) -> tuple[np.ndarray, ...]:
    return OPS[s.op].ref(s.attrs, s.args, s.types())


def wide(a: np.ndarray) -> torch.Tensor:
    if a.dtype.kind in "iu":
        return torch.from_numpy(a.astype(np.int64))
    return torch.from_numpy(a.astype(np.float64))


def test_every_op_has_a_sample() -> None:
    assert {s.op for s in ALL} | CACHE_OPS == set(OPS)


@pytest.mark.parametrize("s", ALL, ids=lambda s: s.op)
def test_inferred_type_is_that_of_the_result(s: Sample) -> None:
    made = run(s)
    types = OPS[s.op].infer(s.attrs, s.types())
    assert len(made) == len(types)
    for array, t in zip(made, types, strict=True):
        assert dtype_name(array.dtype) == t.dtype
        assert array.shape == tuple(n if isinstance(d, str) else d for d, n in zip(t.shape, array.shape, strict=True))


@pytest.mark.parametrize("s", ALL, ids=lambda s: s.op)
def test_reference_equals_torch(s: Sample) -> None:
    want = expected(s)
    for array, t in zip(run(s), want, strict=True):
        np.testing.assert_allclose(
            array.astype(np.float64),
            t.to(torch.float64).numpy(),
            rtol=2e-6,
            atol=1e-4 if s.op.startswith("q") else 2e-6,
        )


def expected(s: Sample) -> tuple[torch.Tensor, ...]:
    """What torch makes of the sample, in float64."""
    args = [wide(_logical(a, t)) for a, t in zip(s.args, s.types(), strict=True)]
    if s.op in SPECIAL:
        out = SPECIAL[s.op](s, *args)
        return out if isinstance(out, tuple) else (out,)
    if "scalar" in s.attrs:
        pair = [args[0], torch.tensor(s.attrs["scalar"], dtype=torch.float64)]
        args = pair[::-1] if s.attrs.get("reversed") else pair
    return (TORCH[s.op](*args),)


def _logical(a, t):
    return unpack(a, t.shape, t.layout) if t.layout in PACKED else a


def _norm(name):
    def call(s, x, *params):
        total = None
        if name.startswith("add"):
            x, params = x + params[0], params[1:]
            total = x
        if name.endswith("rms_norm"):
            out = F.rms_norm(x, x.shape[-1:], params[0] if params else None, s.attrs["eps"])
        else:
            out = F.layer_norm(x, x.shape[-1:], *params, eps=s.attrs["eps"])
        return out if total is None else (out, total)

    return call


ACT = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu2": lambda x: F.relu(x) ** 2,
}


def _rotary(s, x, cos, sin, positions):
    half = cos.shape[1]
    rot, rest = x[..., : 2 * half], x[..., 2 * half :]
    pairs = rot.reshape(*rot.shape[:-1], half, 2) if s.attrs["interleaved"] else rot.unflatten(-1, (2, half)).mT
    z = torch.view_as_complex(pairs.contiguous())
    turned = torch.view_as_real(z * torch.complex(cos, sin)[positions][:, None])
    flat = turned.flatten(-2) if s.attrs["interleaved"] else turned.mT.flatten(-2)
    return torch.cat([flat, rest], -1)


def _attention(s, q, k, v, *rest):
    sinks = rest[0] if s.attrs.get("sinks") else None
    slopes = rest[-1] if s.attrs.get("alibi") else None
    group = q.shape[1] // k.shape[1]
    q, k, v = (t.transpose(0, 1) for t in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    scores = q @ k.mT * s.attrs["scale"]
    if s.attrs["softcap"]:
        scores = s.attrs["softcap"] * torch.tanh(scores / s.attrs["softcap"])
    i, j = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])[None]
    if slopes is not None:
        scores = scores + slopes[:, None, None] * (j - i)
    seen = {
        "causal": j <= i,
        "sliding": (j <= i) & (i - j < max(1, s.attrs["window"])),
        "chunked": (j <= i) & (i // max(1, s.attrs["window"]) == j // max(1, s.attrs["window"])),
    }[s.attrs["kind"]]
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, q.shape[1], 1)], -1)
    p = scores.softmax(-1)[..., : k.shape[1]]
    return (p @ v).transpose(0, 1)


def _topk(s, x):
    """Stable, hence the lowest index first among equals."""
    values, index = torch.sort(x, dim=-1, descending=s.attrs["largest"], stable=True)
    return values[..., : s.attrs["k"]], index[..., : s.attrs["k"]]


def _gather(s, x, i):
    lead = torch.broadcast_shapes(x.shape[:-1], i.shape[:-1])
    return torch.gather(x.expand(*lead, -1), -1, i.expand(*lead, -1))


def _scatter(s, x, i, src=None):
    x = x.expand(*i.shape[:-1], -1)
    if src is None:
        return x.scatter(-1, i, s.attrs["scalar"])
    return x.scatter_add(-1, i, src) if s.attrs.get("add") else x.scatter(-1, i, src)


def _experts(s, x, ids, w, *rest):
    """Every expert over every token, then the chosen ones."""
    slots = ids.expand(len(x), -1)
    rows = x if x.ndim == 3 else x[:, None].expand(-1, slots.shape[1], -1)
    every = torch.einsum("tjk,enk->tjen", rows, w) + (rest[0] if rest else 0)
    chosen = every.gather(2, slots.clamp(0, len(w) - 1)[..., None, None].expand(-1, -1, 1, every.shape[-1]))[:, :, 0]
    return chosen * ((slots >= 0) & (slots < len(w)))[..., None]


GROUPS = {"mxfp4": 32, "q4_1": 32, "q8_0": 32, "q6_k": 16}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def _dequantized(s, q, scale, z=None):
    """W[.., N, K] from its parts, group by group."""
    name = s.attrs["scheme"]
    if name == "mxfp4":
        q = torch.where(q < 8, E2M1[q % 8], -E2M1[q % 8])
    if scale.ndim < q.ndim:
        return q * scale[..., None]
    zero = torch.full_like(scale, 8.0 if name.startswith("int4-wo") else 0.0) if z is None else z
    size = GROUPS.get(name) or (int(name.split("-g")[1]) if "-g" in name else 128)
    groups = q.split(size, dim=-1)
    return torch.cat([(g - zero[..., i, :, None]) * scale[..., i, :, None] for i, g in enumerate(groups)], dim=-1)


def _rounded(x, dtype, *rest, group=None):
    """Codes and scales of the rows less a shift, as torch rounds; behind the codes the second digits of outliers."""
    if group is not None:
        codes, scale = _rounded(x.unflatten(-1, (-1, group)), dtype)
        return codes.flatten(-2), scale
    outliers = [i for i in rest if not i.is_floating_point()]
    x = x.float() - sum(i.float() for i in rest if i.is_floating_point())
    limit = {"i8": 127.0, "f8e4m3": 448.0}[dtype]
    scale = (x.abs().amax(-1).float() / limit).double()
    ratio = (x.float() / scale.float()[..., None]).clamp(-limit, limit)
    codes = ratio.round() if dtype == "i8" else ratio.to(torch.float8_e4m3fn).float()
    for i in outliers:
        left = (ratio - codes)[..., i.long()].to(torch.float8_e4m3fn).float()
        codes = torch.cat([codes, left, codes[..., i.long()]], -1)
    return codes.double(), scale


def _made_and_rounded(s, *args):
    """Rows by the first op, whose inputs come first; the shift and the outliers of their rounding come last."""
    taken = bool(s.attrs.get("shift")) + (not args[-1].is_floating_point())
    made = SPECIAL[s.op.removesuffix("_quantize")](s, *args[: len(args) - taken])
    rows, *others = made if isinstance(made, tuple) else (made,)
    return (*others, *_rounded(rows, s.attrs["dtype"], *args[len(args) - taken :]))


def _quantized(s, x, *rest):
    """qlinear and qexpert_linear: rows times their scales, and a weight of floats."""
    row, rest = SCHEMES[s.attrs["scheme"]], list(rest)
    if row.act:
        scales = rest.pop(0)
        x = x * (scales.repeat_interleave(row.group, -1) if row.by_group else scales[..., None])
    ids = [rest.pop(0)] if s.op == "qexpert_linear" else []
    w = _dequantized(s, *rest[: len(row.parts)])
    bias = rest[len(row.parts) :]
    return _experts(s, x, *ids, w, *bias) if ids else F.linear(x, w, *bias)


def _gated(s, *args):
    """The product, whose first half of columns gates the second."""
    gate, up = SPECIAL[s.op.removesuffix("_act_mul")](s, *args).chunk(2, -1)
    return ACT[s.attrs["act"]](gate) * up


def _fused(s, *args):
    """The one code of the samples, by hand."""
    if s.attrs["code"] == "mul(i0,i1)":
        return args[0] * args[1]
    x = F.gelu(args[0] * 0.5, approximate="tanh")
    kept = torch.where(x > args[1], x, torch.tensor(-torch.inf, dtype=torch.float64))
    return F.gelu(torch.maximum(kept, args[2]))


SPECIAL = {
    "topk": _topk,
    "gather": _gather,
    "scatter": _scatter,
    "expert_linear": _experts,
    "qexpert_linear": _quantized,
    "quantize_rows": lambda s, x, *rest: _rounded(x, s.attrs["dtype"], *rest, group=s.attrs.get("group")),
    "fused": _fused,
    "all_reduce": lambda s, *xs: sum(xs),
    "all_gather": lambda s, *xs: torch.cat([*xs[:-1], xs[-1][..., 1:]], -1),  # the last two share a column
    "weighted_sum": lambda s, y, w: (y * w[..., None]).sum(1),
    "matmul": lambda s, a, b: a @ b,
    "softmax": lambda s, x: x.softmax(-1),
    "cumsum": lambda s, x: x.cumsum(-1),
    "argmax": lambda s, x: x.argmax(-1, keepdim=True),
    "where": lambda s, c, a, b: torch.where(c != 0, a, b),
    "expand": lambda s, x: (
        x.expand(s.attrs.get("length", -1), *s.attrs["shape"][1:])
        if s.attrs["shape"][0] == -1
        else x.expand(s.attrs["shape"])
    ),
    "gelu": lambda s, x: F.gelu(x, approximate="tanh" if s.attrs["tanh"] else "none"),
    "cast": lambda s, x: x.to(torch.bfloat16) if s.attrs["dtype"] == "bf16" else x,
    "reshape": lambda s, x: x.reshape(s.attrs["shape"]),
    "transpose": lambda s, x: x.permute(s.attrs["perm"]),
    "slice": lambda s, x: x.narrow(s.attrs["axis"], s.attrs["start"], s.attrs["stop"] - s.attrs["start"]),
    "concat": lambda s, *xs: torch.cat(xs, s.attrs["axis"]),
    "copy": lambda s, x: x,
    "take_rows": lambda s, x, i: x[i],
    "embedding": lambda s, w, i: F.embedding(i, w),
    "qembedding": lambda s, *args: F.embedding(args[-1], _dequantized(s, *args[:-1])),
    "linear": lambda s, x, w, *b: F.linear(x, w, *b),
    "qlinear": _quantized,
    "act_mul": lambda s, g, u: ACT[s.attrs["act"]](g) * u,
    "rotary": _rotary,
    "attention": _attention,
    **{n: _norm(n) for n in ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")},
    **{n: _made_and_rounded for n in rounded.NAMES},
    **{n: _gated for n in gated.NAMES},
}
TORCH = {
    "neg": torch.neg, "abs": torch.abs, "exp": torch.exp, "log": torch.log, "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal, "square": torch.square, "cos": torch.cos, "sin": torch.sin,
    "tanh": torch.tanh, "erf": torch.erf, "sigmoid": torch.sigmoid, "silu": F.silu, "relu": F.relu,
    "softplus": F.softplus, "floor": torch.floor, "add": torch.add, "sub": torch.sub, "mul": torch.mul,
    "div": torch.div, "pow": torch.pow, "maximum": torch.maximum, "minimum": torch.minimum,
    "mean": lambda x: x.mean(-1, keepdim=True), "sum": lambda x: x.sum(-1, keepdim=True),
    "amax": lambda x: x.amax(-1, keepdim=True), "amin": lambda x: x.amin(-1, keepdim=True),
    "prod": lambda x: x.prod(-1, keepdim=True), "expm1": torch.expm1, "log1p": torch.log1p, "sign": torch.sign,
    "round": torch.round, "ceil": torch.ceil, "trunc": torch.trunc, "gt": torch.gt, "ge": torch.ge, "lt": torch.lt,
    "le": torch.le, "eq": torch.eq, "ne": torch.ne, "remainder": torch.remainder, "floor_divide": torch.floor_divide,
}  # fmt: skip
