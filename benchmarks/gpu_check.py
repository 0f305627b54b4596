"""Does a plan run on this GPU as it should, and how fast? One command, some minutes, a JSON row a finding.

Loads every cubin, runs prefill and decode beside the op table's references in float32 on the CPU (not with
--no-references: those of a large model take long), then times whole steps of several sizes, against what the plan's
estimate and the bytes that a step must read on each GPU say. Of a plan of several ranks, runs what they do together on
one GPU first. Needs a GPU a rank, or --emulated to try the script.

    planc build --model M --target h200 -o plan && benchmarks/gpu_check.sh plan
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks import gpu_ranks
from benchmarks.common import median, row
from planc.compiler.emulate import Reference, batches, compared, read_weights
from planc.compiler.ir import text
from planc.plans import store
from planc.plans.schema import Plan
from planc.runtime.batch import Batch, Executor
from planc.runtime.goldens import verify

PAGES = 4096  # of the KV cache, at most
PAST = 1024  # tokens before a decode step, where sequences may be so long


@contextmanager
def executor_of(root: Path, plan: Plan, pages: int, emulated: bool) -> Iterator[Executor]:
    """The plan's executor on this machine's GPU, or on an emulated one."""
    if emulated:
        from planc.emulator.run import emulated as opened

        with opened(root, plan, pages) as gpu:
            yield gpu.executor
        return
    from planc.runtime.executors import open_executor

    executor = open_executor(root, plan, pages)
    try:
        yield executor
    finally:
        executor.close()


def decode_batch(plan: Plan, seqs: int, past: int) -> Batch:
    """One token of each of `seqs` sequences after `past` others, pages in a row."""
    block = plan.kv.block_size
    width = past // block + 1
    table = np.arange(seqs * width, dtype=np.int32).reshape(seqs, width)
    return Batch(
        ids=np.arange(seqs, dtype=np.int32) % plan.limits.vocab_size,
        positions=np.full(seqs, past, np.int32),
        slots=(table[:, past // block] * block + past % block).astype(np.int32),
        page_table=table,
        query_start=np.arange(seqs + 1, dtype=np.int32),
        logit_rows=np.arange(seqs, dtype=np.int32),
    )


def prefill_batch(plan: Plan, tokens: int) -> Batch:
    """A prompt of `tokens`, its last logits."""
    at = np.arange(tokens, dtype=np.int32)
    width = -(-tokens // plan.kv.block_size)
    return Batch(
        ids=at % np.int32(plan.limits.vocab_size),
        positions=at,
        slots=at.copy(),
        page_table=np.arange(width, dtype=np.int32)[None],
        query_start=np.array([0, tokens], np.int32),
        logit_rows=np.array([tokens - 1], np.int32),
    )


def timed(executor: Executor, batch: Batch, runs: int) -> float:
    """Median seconds of a step, host copies included."""
    executor.step(batch)
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        executor.step(batch)
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def right(root: Path, plan: Plan, executor: Executor) -> bool:
    """Steps beside the references, then the goldens."""
    graph = text.read(root / store.GRAPH)
    reference = Reference(plan, graph, [read_weights(root, plan, graph, rank) for rank in range(plan.limits.ranks)])
    good = True
    for name, batch in batches(plan, seed=0):
        found = compared(name, executor.step(batch).copy(), reference.step(batch))
        row(benchmark="gpu_check", step=name, ok=found.ok, detail=found.detail)
        good &= found.ok
    for verdict in verify(plan, executor):
        row(benchmark="gpu_check", golden=verdict.golden.prompt, equal_up_to=verdict.differs_at, ok=verdict.ok)
    return good


def speed(plan: Plan, executor: Executor, pages: int, runs: int) -> None:
    """Steps of several sizes; bytes are those that a decode step cannot do without."""
    limits, block = plan.limits, plan.kv.block_size
    for seqs in sorted({min(n, limits.max_num_seqs) for n in (1, 8, 32, 64)}):
        past = min(PAST, limits.max_model_len - 1, pages // seqs * block - 1)
        seconds = timed(executor, decode_batch(plan, seqs, past), runs)
        moved = plan.memory.weights + seqs * (past + 1) * plan.memory.kv_token
        row(
            benchmark="gpu_check", step="decode", seqs=seqs, context=past, ms=seconds * 1e3,
            tokens_per_s=seqs / seconds, gb_per_s=moved / seconds / 1e9,
        )  # fmt: skip
    for tokens in sorted({min(n, limits.max_num_batched_tokens, limits.max_model_len) for n in (128, 512, 2048)}):
        seconds = timed(executor, prefill_batch(plan, tokens), runs)
        flops = 2 * plan.model.num_parameters * tokens
        row(
            benchmark="gpu_check", step="prefill", tokens=tokens, ms=seconds * 1e3, tokens_per_s=tokens / seconds,
            tflops=flops / seconds / 1e12,
        )  # fmt: skip
    for e in plan.estimates:
        row(benchmark="gpu_check", estimate=e.step, tokens=e.tokens, seqs=e.seqs, context=e.context, ms=e.milliseconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--no-references", action="store_true", help="time alone")
    parser.add_argument("--emulated", action="store_true", help="on the emulator: to try this script")
    args = parser.parse_args()
    plan = store.load(args.plan)
    pages = min(PAGES, plan.sequence_pages * plan.limits.max_num_seqs)
    good = plan.limits.ranks == 1 or gpu_ranks.check(args.plan, plan, args.runs, args.emulated)
    start = time.perf_counter()
    with executor_of(args.plan, plan, pages, args.emulated) as executor:
        row(benchmark="gpu_check", plan=args.plan.name, target=plan.target, load_s=time.perf_counter() - start)
        good &= args.no_references or right(args.plan, plan, executor)
        speed(plan, executor, pages, args.runs)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
