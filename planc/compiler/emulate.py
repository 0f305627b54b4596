"""`planc verify --emulate`: in goes a CUDA plan, out come its kernels' results on this CPU beside the references.

A plan of a small model is run whole: the real executor on an emulated GPU, prefill and decode of the goldens' tokens,
against the op table's references in float32. Of any other plan, each kernel is run by itself at its shipping tile size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from planc.compiler.accuracy import log_softmax
from planc.compiler.ir import interp, text
from planc.compiler.ir.graph import Graph
from planc.compiler.ir.types import DTYPES
from planc.compiler.weights import stored_shape
from planc.errors import PlancError
from planc.plans import store
from planc.plans.schema import Plan
from planc.plans.tensors import read_header
from planc.runtime.batch import Batch

WHOLE = 50_000_000  # parameters that are run whole: some seconds a step
STEPS = 3  # decode steps after the prompt
PROMPT = 24  # tokens of it
# Mean KL in nats that rounding of activations to bf16 or 8 bits, and another order of additions, stay below.
MOST_KL = 0.02


@dataclass(frozen=True)
class Verdict:
    """One check: a step of the whole model or a kernel, whether it holds, and what was measured."""

    name: str
    ok: bool
    detail: str


def read_weights(root: Path, plan: Plan, graph: Graph, rank: int = 0) -> dict[str, np.ndarray]:
    """Every weight of a graph as a rank has it stored, mapped."""
    found = {name: (root / f, e) for f in plan.weight_files_of(rank) for name, e in read_header(root / f).items()}
    arrays: dict[str, np.ndarray] = {}
    for w in graph.weights:
        path, entry = found[w.name]
        shape = stored_shape(w.value.type)
        arrays[w.name] = np.memmap(path, DTYPES[w.value.type.dtype], "r", entry.offset, shape)
    return arrays


def whole(root: Path, plan: Plan, seed: int = 0) -> Iterator[Verdict]:
    """A prompt and some tokens after it, step by step, all of the plan's launches in random order.

    The reference sees the same tokens, whatever the plan would have chosen. PlancError names the kernel, thread and
    instruction of a wrong access, and launches that nothing orders.
    """
    from planc.compiler.emulate_sampling import greedy
    from planc.emulator.run import emulated

    graph = text.read(root / store.GRAPH)
    ranks = [read_weights(root, plan, graph, rank) for rank in range(plan.limits.ranks)]
    reference = Reference(plan, graph, ranks)
    with emulated(root, plan, reference.pages, seed=seed) as gpu:
        for name, batch in batches(plan, seed):
            tokens = None
            if gpu.executor.samples:
                tokens, logits = gpu.executor.sample_step(batch, greedy(len(batch.logit_rows)), with_logits=True)
            else:
                logits = gpu.executor.step(batch)
            yield compared(name, logits.copy(), reference.step(batch), tokens)


class Reference:
    """The references of the graph on every rank, each with a cache of its own."""

    def __init__(self, plan: Plan, graph: Graph, weights: list[dict[str, np.ndarray]]) -> None:
        self.graph, self.weights = graph, weights
        self.pages = 2 * (-(-(PROMPT + STEPS) // plan.kv.block_size) + 1)
        self.kv = [np.zeros((self.pages, plan.kv.page_bytes), np.uint8) for _ in weights]

    def step(self, batch: Batch) -> np.ndarray:
        names = ("ids", "positions", "slots", "page_table", "query_start", "logit_rows")
        given = {name: getattr(batch, name) for name in names}
        found = interp.run_ranks(self.graph, [given | {"kv": kv} for kv in self.kv], self.weights)
        return next(iter(found[0].values()))


def batches(plan: Plan, seed: int) -> Iterator[tuple[str, Batch]]:
    """A prompt in two unequal parts, then decode steps of it beside a second sequence; pages are not in order."""
    rng = np.random.default_rng(seed)
    limit = min(PROMPT, plan.limits.max_model_len - STEPS - 1, plan.limits.max_num_batched_tokens)
    if limit < 2:
        raise PlancError(f"the plan's sequences have {plan.limits.max_model_len} tokens; emulation needs at least 6.")
    golden = next((g.prompt_ids for g in plan.goldens), ())
    ids = [*golden, *rng.integers(0, plan.limits.vocab_size, PROMPT)][:limit]
    after = rng.integers(0, plan.limits.vocab_size, (STEPS, 2))
    block = plan.kv.block_size
    half = -(-(PROMPT + STEPS) // block) + 1
    order = rng.permutation(2 * half).astype(np.int32)
    tables = order.reshape(2, half)

    def made(pieces: list[tuple[int, int, list[int]]]) -> Batch:
        """Of (sequence, start, tokens) each; logits after the last token of each."""
        counts = [len(t) for _, _, t in pieces]
        positions = np.concatenate([np.arange(s, s + len(t)) for _, s, t in pieces]).astype(np.int32)
        owner = np.repeat([q for q, _, _ in pieces], counts)
        ends = np.cumsum(counts)
        return Batch(
            ids=np.concatenate([np.asarray(t, np.int32) for _, _, t in pieces]),
            positions=positions,
            slots=(tables[owner, positions // block] * block + positions % block).astype(np.int32),
            page_table=np.ascontiguousarray(tables[[q for q, _, _ in pieces]]),
            query_start=np.concatenate([[0], ends]).astype(np.int32),
            logit_rows=(ends - 1).astype(np.int32),
        )

    cut = limit * 2 // 3
    yield f"prefill of {cut} tokens", made([(0, 0, list(ids[:cut]))])
    rest = list(ids[cut:])
    if plan.limits.max_num_seqs == 1:
        yield f"prefill of {len(rest)} more", made([(0, cut, rest)])
        for n in range(STEPS):
            yield f"decode step {n + 1}", made([(0, limit + n, [int(after[n, 0])])])
        return
    yield f"prefill of {len(rest)} more beside another of {cut}", made([(0, cut, rest), (1, 0, list(ids[:cut]))])
    for n in range(STEPS):
        pair = [(0, limit + n, [int(after[n, 0])]), (1, cut + n, [int(after[n, 1])])]
        yield f"decode step {n + 1} of 2 sequences", made(pair)


def compared(name: str, logits: np.ndarray, wanted: np.ndarray, chosen: np.ndarray | None = None) -> Verdict:
    """Mean KL of two sets of logits [R, vocab], and their largest difference; what the GPU has `chosen` [R, 2] must be
    the tokens of the largest logits.
    """
    if not np.isfinite(logits).all():
        return Verdict(name, False, "logits are not finite")
    p, q = log_softmax(wanted), log_softmax(logits)
    kl = float((np.exp(p) * (p - q)).sum(-1).mean())
    same = int((wanted.argmax(-1) == logits.argmax(-1)).sum())
    detail = (
        f"KL {kl:.2g} nats, largest difference {np.abs(logits - wanted).max():.2g} of logits up to "
        f"{np.abs(wanted).max():.2g}, {same} of {len(logits)} greedy tokens agree"
    )
    if chosen is not None and not np.array_equal(chosen[:, 0], logits.argmax(-1)):
        return Verdict(name, False, f"the tokens {chosen[:, 0].tolist()} were chosen; {detail}")
    return Verdict(name, kl <= MOST_KL, detail)


def verify(root: Path, report: Callable[[Verdict], None], seed: int = 0, kernels: bool = False) -> bool:
    """Runs what can be run of a plan; True when all of it holds. PlancError for a plan that is no CUDA plan."""
    from planc.compiler.emulate_kernels import each_kernel

    plan = store.load(root)
    if not plan.is_cuda:
        raise PlancError(f"{root} is for {plan.target}; --emulate runs plans for GPUs. Leave it out to run this one.")
    small = plan.has_weights and plan.model.num_parameters <= WHOLE
    checks = whole(root, plan, seed) if small and not kernels else each_kernel(root, plan, seed)
    good = True
    for verdict in checks:
        report(verdict)
        good &= verdict.ok
    return good
