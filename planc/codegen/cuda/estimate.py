"""What a step should take on a GPU: in go a planned graph, a GPU and a step, out come times and what bounds each.

Products take what the cost model says of the tiles that they have. All else is a roofline: a kernel takes the longer of
its bytes over the memory's bandwidth and its products over the tensor cores' rate, and never less than a launch. It
ranks GPUs, dtypes and sizes of step; expect it to be off by 30 %.
"""

from collections.abc import Mapping, Set

from planc.codegen.cuda.call import Bucket, calls
from planc.codegen.cuda.cost import BANDWIDTH, LAUNCH, RATE
from planc.codegen.cuda.lower import aligned
from planc.codegen.cuda.tiles import Tiles
from planc.codegen.skus import SKU
from planc.codegen.work import PRODUCTS, Step, work
from planc.compiler.ir.graph import Graph, Node
from planc.compiler.ir.ops import OPS
from planc.compiler.ir.types import TensorType
from planc.plans.schema import Estimate, KernelEstimate

_SAMPLING = 3  # launches that choose tokens, one after the other
_COLLECTIVE = 10e-6  # seconds of an exchange of nothing
CONTEXT = 1024  # tokens that each sequence of an estimated decode step looks at
_SEQS = (1, 8, 64)


def estimates(
    graph: Graph, tiles: Tiles, max_seqs: int, max_tokens: int, max_len: int, ranks: int = 1
) -> list[Estimate]:
    """Decode steps of some batch sizes, and a prefill of the largest step: one prompt, or several if they are short."""
    context = min(CONTEXT, max_len)
    steps = [(Bucket(n, n, n), context) for n in sorted({min(n, max_seqs) for n in _SEQS})]
    prompts = -(-max_tokens // max_len)
    steps.append((Bucket(max_tokens, prompts, prompts), max_tokens // prompts))
    return [_estimate(graph, tiles, bucket, length, ranks) for bucket, length in steps]


def _estimate(graph: Graph, tiles: Tiles, bucket: Bucket, context: int, ranks: int) -> Estimate:
    found: dict[tuple[str, str], list[float]] = {}
    gpu, wide, size = tiles.gpu, aligned(graph), Step(bucket.tokens, bucket.seqs, bucket.rows, context)
    for n in graph.nodes:
        if not OPS[n.op].view:
            if n.op in PRODUCTS:
                seconds, bound = _product(n, graph.types, tiles, bucket, wide)
            else:
                seconds, bound = _time(n, graph.types, gpu, size, ranks)
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
    moved = graph.types[graph.outputs[0]].nbytes(bucket.dims)
    memory, least = moved / (gpu.bandwidth_gbs * 1e9 * BANDWIDTH), _SAMPLING * LAUNCH
    return max((memory + least - LAUNCH, "memory"), (least, "launches"))


def _product(
    n: Node, types: Mapping[str, TensorType], tiles: Tiles, bucket: Bucket, wide: Set[str]
) -> tuple[float, str]:
    """Seconds of a product, and what bounds it; the launches that put experts in order take their time."""
    made = calls(n, types, tiles.gpu.sm.number, bucket, wide, tiles)
    (chosen,) = (c.choice.cost for c in made if c.choice is not None)
    return chosen.seconds + (len(made) - 1) * LAUNCH, chosen.bound


def _time(n: Node, types: Mapping[str, TensorType], gpu: SKU, step: Step, ranks: int) -> tuple[float, str]:
    """Seconds of a node's launches, and what bounds them: memory, tensor cores, NVLink or launches."""
    found = work(n, types, step)
    if n.op in ("all_reduce", "all_gather"):
        sent = found.nbytes * (ranks - 1) / ranks
        link = gpu.nvlink_gbs or 32.0  # without NVLink: PCIe 4
        return _COLLECTIVE + sent / (link / 2 * 1e9), "NVLink" if gpu.nvlink_gbs else "PCIe"
    memory = found.nbytes / (gpu.bandwidth_gbs * 1e9 * BANDWIDTH)
    compute = found.operations / (gpu.tflops["bf16"] * 1e12 * RATE)
    if max(memory, compute) < LAUNCH:
        return LAUNCH, "launches"
    return max((memory, "memory"), (compute, "tensor cores"))
