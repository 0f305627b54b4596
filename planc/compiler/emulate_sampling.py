"""Token choice of a CUDA plan: in goes a plan, out comes whether its kernels choose, in the emulator, what the host's
sampler does.

The tokens of a whole step are greedy, so the logits beside them say which they must be. By themselves the kernels see
random logits at the plan's vocabulary, one way of choosing a row.
"""

from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np

from planc.codegen.cuda.call import Bucket
from planc.codegen.cuda.lower import sampling
from planc.compiler.emulate import Verdict
from planc.compiler.emulate_kernels import execute
from planc.compiler.ir.graph import Graph
from planc.emulator.memory import Memory
from planc.plans.launches import KV, LaunchPlan
from planc.plans.sampling import GREEDY, KIND, RECORD, RECORDS, REPETITION, SAMPLED
from planc.plans.schema import Plan
from planc.runtime.choice import write
from planc.runtime.sampler import sample
from planc.runtime.sequence import SamplingParams
from planc.runtime.sequence import Sequence as Stream

_TOKENS = 40  # of a sequence, so that penalties find more than one page
_MEMORY = 64 << 30
_WAYS = (
    SamplingParams(temperature=0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.95),
    SamplingParams(temperature=1.0, min_p=0.01),
    SamplingParams(temperature=0),
)


def greedy(rows: int) -> np.ndarray:
    """Records of rows whose largest logit is taken."""
    records = np.zeros((rows, RECORD), np.int32)
    records[:, KIND] = GREEDY
    records.view(np.float32)[:, REPETITION] = 1.0
    return records


def check(root: Path, plan: Plan, graph: Graph, held: LaunchPlan, seed: int) -> Verdict:
    """The kernels by themselves, in the smallest step with a row for each way of choosing."""
    rng = np.random.default_rng(seed)
    steps = sorted(held.graphs, key=lambda g: (g.rows, g.tokens))
    rows = next((g.rows for g in steps if g.rows >= len(_WAYS)), steps[-1].rows)
    seqs = [_stream(plan, way, n, rng) for n, way in enumerate(_WAYS[:rows])]
    logits = (4 * rng.standard_normal((rows, plan.limits.vocab_size))).astype(np.float32)
    arrays = _inputs(plan, held, seqs, rows, rng)
    arrays |= {held.logits: logits.copy(), SAMPLED: np.full((rows, 2), -1, np.int32)}
    made = sampling(graph, held.page_table_stride).calls(Bucket(len(arrays["ids"]), rows, rows))
    memory = Memory(_MEMORY)
    scratch = {n: np.zeros(size, np.uint8) for c in made for n, size in c.scratch.items()}
    places = {n: memory.put(a) for n, a in {**arrays, **scratch}.items()}
    for call in made:
        execute(root, held, call, places, memory, np.arange(prod(call.grid)))
    chosen = memory.get(places[SAMPLED], (rows, 2), np.int32)[: len(seqs), 0].tolist()
    wanted = [sample(row, seq, ()) for row, seq in zip(logits, seqs, strict=False)]
    same = sum(a == b for a, b in zip(chosen, wanted, strict=True))
    name = f"token choice in steps of {rows} rows: {'+'.join(c.kernel.name for c in made)}"
    return Verdict(name, same == len(seqs), f"{same} of {len(seqs)} tokens are those of the host's sampler")


def _stream(plan: Plan, way: SamplingParams, number: int, rng: np.random.Generator) -> Stream:
    count = min(_TOKENS, plan.limits.max_model_len - 1)
    tokens = rng.integers(0, plan.limits.vocab_size, count).tolist()
    return Stream(number, [*tokens[: count // 2], *tokens[: count - count // 2]], count // 2, way, seed=number)


def _inputs(
    plan: Plan, held: LaunchPlan, seqs: Sequence[Stream], rows: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """A step of all tokens of the sequences, whose pages are not in order."""
    block, count = plan.kv.block_size, len(seqs[0].tokens)
    width = -(-count // block)
    pages = rng.permutation(len(seqs) * width).reshape(len(seqs), width)
    table = np.zeros((rows, held.page_table_stride), np.int32)
    table[: len(seqs), :width] = pages
    positions = np.arange(count)
    slots = pages[:, positions // block] * block + positions % block
    records = np.zeros((rows, RECORD), np.int32)
    for number, seq in enumerate(seqs):
        write(records[number], seq, number, ())
    ids = np.array([seq.tokens for seq in seqs], np.int32)
    cache = np.zeros((pages.size, plan.kv.page_bytes), np.uint8)
    made = {"ids": ids.ravel(), "slots": slots.ravel().astype(np.int32), "page_table": table}
    return made | {RECORDS: records, KV: cache}
