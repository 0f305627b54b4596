"""What a step should take on a GPU: in go a planned graph, a GPU and a step, out come times and what bounds each.

A roofline: a kernel takes the longer of its bytes over the memory's bandwidth and its products over the tensor cores'
rate, and never less than a launch. It ranks GPUs, dtypes and sizes of step; expect it to be off by 30 %.
"""

from collections.abc import Mapping
from math import prod

from planc.codegen.cuda.call import Bucket
from planc.codegen.skus import SKU
from planc.compiler.ir.graph import Graph, Node
from planc.compiler.ir.ops import OPS
from planc.compiler.ir.quant import scheme
from planc.compiler.ir.types import TensorType
from planc.plans.schema import Estimate, KernelEstimate

# What large products and copies reach of the published rates, measured on an H200: 769-798 of 989 TFLOP/s in bf16, 4.3
# of 4.8 TB/s.
_RATE, _BANDWIDTH = 0.8, 0.9
_LAUNCH = 2e-6  # seconds that a kernel in a graph takes at least
_SAMPLING = 3  # launches that choose tokens, one after the other
_COLLECTIVE = 10e-6  # seconds of an exchange of nothing
CONTEXT = 1024  # tokens that each sequence of an estimated decode step looks at
_SEQS = (1, 8, 64)
_UNCOUNTED = {"S1": 1, "P": 1, "M": 1}  # axes of inputs whose bytes are counted by what is read, or are few


def estimates(graph: Graph, gpu: SKU, max_seqs: int, max_tokens: int, max_len: int, ranks: int = 1) -> list[Estimate]:
    """Decode steps of some batch sizes, and a prefill of the largest step: one prompt, or several if they are short."""
    context = min(CONTEXT, max_len)
    steps = [(Bucket(n, n, n), context) for n in sorted({min(n, max_seqs) for n in _SEQS})]
    prompts = -(-max_tokens // max_len)
    steps.append((Bucket(max_tokens, prompts, prompts), max_tokens // prompts))
    return [_estimate(graph, gpu, bucket, length, ranks) for bucket, length in steps]


def _estimate(graph: Graph, gpu: SKU, bucket: Bucket, context: int, ranks: int) -> Estimate:
    found: dict[tuple[str, str], list[float]] = {}
    for n in graph.nodes:
        if not OPS[n.op].view:
            seconds, bound = _time(n, graph.types, gpu, bucket, context, ranks)
            found.setdefault((n.op, bound), []).append(seconds)
    seconds, bound = _sampling(graph, gpu, bucket)
    found["sampling", bound] = [seconds]
    kernels = [KernelEstimate(op, len(s), sum(s) * 1e3, bound) for (op, bound), s in found.items()]
    kernels.sort(key=lambda k: -k.milliseconds)
    total = sum(k.milliseconds for k in kernels)
    step = "decode" if bucket.tokens == bucket.seqs else "prefill"
    return Estimate(step, bucket.tokens, bucket.seqs, context, total, bucket.tokens / total * 1e3, tuple(kernels))


def _sampling(graph: Graph, gpu: SKU, bucket: Bucket) -> tuple[float, str]:
    """Seconds of choosing greedy tokens: the logits are read once, by launches of which only one has much to do."""
    moved = _nbytes(graph.types[graph.outputs[0]], bucket)
    memory, least = moved / (gpu.bandwidth_gbs * 1e9 * _BANDWIDTH), _SAMPLING * _LAUNCH
    return max((memory + least - _LAUNCH, "memory"), (least, "launches"))


def _time(
    n: Node, types: Mapping[str, TensorType], gpu: SKU, bucket: Bucket, context: int, ranks: int
) -> tuple[float, str]:
    """Seconds of a node's launches, and what bounds them: memory, tensor cores, NVLink or launches."""
    moved, products, dtype = _work(n, types, bucket, context)
    if n.op in ("all_reduce", "all_gather"):
        sent = moved * (ranks - 1) / ranks
        link = gpu.nvlink_gbs or 32.0  # without NVLink: PCIe 4
        return _COLLECTIVE + sent / (link / 2 * 1e9), "NVLink" if gpu.nvlink_gbs else "PCIe"
    rate = gpu.tflops.get(dtype, gpu.tflops["bf16"])
    memory, compute = moved / (gpu.bandwidth_gbs * 1e9 * _BANDWIDTH), products / (rate * 1e12 * _RATE)
    if max(memory, compute) < _LAUNCH:
        return _LAUNCH, "launches"
    return max((memory, "memory"), (compute, "tensor cores"))


def _work(n: Node, types: Mapping[str, TensorType], bucket: Bucket, context: int) -> tuple[float, float, str]:
    """Bytes moved, floating-point operations on tensor cores, and their dtype."""
    inputs = [types[i] for i in n.inputs]
    out = sum(_nbytes(v.type, bucket) for v in n.outputs)
    if n.op in ("embedding", "qembedding"):
        return 2.0 * out, 0.0, "bf16"
    if n.op == "kv_append":
        return 2.0 * sum(_nbytes(t, bucket) for t in inputs[:2]), 0.0, "bf16"
    if n.op == "paged_attention":
        return _attention(n, inputs, out, bucket, context)
    moved = float(out + sum(_nbytes(t, bucket) for t in inputs))
    if n.op in ("linear", "qlinear", "expert_linear", "qexpert_linear"):
        return _product(n, inputs, moved, bucket)
    return moved, 0.0, "bf16"


def _product(n: Node, inputs: list[TensorType], moved: float, bucket: Bucket) -> tuple[float, float, str]:
    act = scheme(str(n.attr("scheme"))).act if n.op.startswith("q") else None
    first = 1 + (act is not None) + n.op.endswith("expert_linear")  # after x, its scales and the experts' ids
    weight = inputs[first]
    rows = prod(bucket.size(d) for d in n.out.type.shape[:-1])
    if len(weight.shape) == 3:  # of a stack of experts, those that the tokens meet are read
        experts = int(weight.shape[0])
        moved -= sum(_nbytes(t, bucket) for t in inputs[first:]) * max(0.0, 1 - rows / experts)
    k = int(inputs[0].shape[-1])
    return moved, 2.0 * rows * int(n.out.type.shape[-1]) * k, {None: "bf16", "i8": "int8"}.get(act, "fp8")


def _attention(n: Node, inputs: list[TensorType], out: float, bucket: Bucket, context: int) -> tuple[float, float, str]:
    heads, block, dims = (int(n.attr(a)) for a in ("heads", "block", "k_dim"))  # type: ignore[arg-type]
    dims += int(n.attr("v_dim"))  # type: ignore[arg-type]
    window = int(n.attr("window")) or context  # type: ignore[arg-type]
    seen = min(context, window)
    element = {"f32": 4, "bf16": 2}.get(str(n.attr("dtype")), 1)
    moved = _nbytes(inputs[0], bucket) + out + bucket.seqs * -(-seen // block) * block * heads * dims * element
    share = 1.0 if bucket.tokens == bucket.seqs else 0.5  # a prompt's tokens see half of it on the mean
    return moved, 2.0 * bucket.tokens * int(inputs[0].shape[1]) * dims * seen * share, "bf16"


def _nbytes(t: TensorType, bucket: Bucket) -> int:
    return t.nbytes(_UNCOUNTED | bucket.dims)
