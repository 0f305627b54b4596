"""A plan runs where it was built: in goes a plan directory, out come its goldens and its distance to the original."""

import tempfile
from dataclasses import replace
from pathlib import Path

from planc.codegen import cpu, program
from planc.codegen import target as targets
from planc.compiler import accuracy, weights
from planc.compiler.backends import generate, kv_of
from planc.compiler.ir.graph import Graph
from planc.compiler.progress import Progress
from planc.compiler.reference import Judge
from planc.compiler.residency import bounded
from planc.compiler.source import ModelSource
from planc.compiler.weight_errors import errors, quantized
from planc.errors import PlancError
from planc.passes.options import Options
from planc.passes.retarget import retarget
from planc.plans import schema
from planc.plans.host import missing_flags
from planc.runtime.batch import Executor
from planc.runtime.executors import open_on_cpu
from planc.runtime.goldens import Scorer
from planc.runtime.tokenizer import Tokenizer

_KV_HERE = {"f8e4m3": "f8e3m4"}  # elements of a GPU's cache -> what the CPU has in their place
_ROWS_BYTES = 16 << 20  # of reference logits at a time, in float32


def judge_of(source: ModelSource, limit: int) -> Judge:
    """The model that plans of sequences of `limit` tokens are judged by."""
    vocab = getattr(source.config().get_text_config(), "vocab_size", 1 << 16)
    return Judge(source, rows_per_chunk=max(1, min(64, _ROWS_BYTES // (4 * vocab))), limit=limit)


def measure(
    root: Path,
    graph: Graph,
    plan: schema.Plan,
    judge: Judge | None,
    options: Options,
    progress: Progress,
) -> schema.Plan:
    """Goldens and accuracy of the plan that lies in `root`, run here: by its own library, or by one for this CPU."""
    with tempfile.TemporaryDirectory(prefix="planc-") as scratch:
        runnable, home, on = plan, root, options.target
        if missing_flags(plan.target):
            on = targets.host()
            bar = progress.counter("kernels for this CPU")
            cpu.build(program.program(graph, on, options.dims), Path(scratch) / "kernels", progress=bar)
            (Path(scratch) / "weights").symlink_to((root / "weights").resolve())
            runnable, home = replace(plan, target=str(on)), Path(scratch)
        executor = open_on_cpu(home, runnable, num_blocks=min(options.sequence_pages, -(-4096 // options.block_size)))
        try:
            with bounded(executor, plan.memory.weights):
                goldens, measured = _score(root, executor, plan, judge, progress)
        finally:
            executor.close()
    return replace(plan, goldens=goldens, accuracy=measured, goldens_target=str(on))


def measure_twin(
    root: Path,
    graph: Graph,
    plan: schema.Plan,
    source: ModelSource,
    judge: Judge | None,
    options: Options,
    progress: Progress,
) -> schema.Plan:
    """A GPU's plan with the goldens and accuracy of one of the same weights and schemes for this CPU, which is made
    beside `root` and dropped. An fp8 cache is in the CPU's own fp8.
    """
    progress.say("measuring with a plan of the same weights for this CPU")
    options = replace(options, target=targets.host(), kv_dtype=_KV_HERE.get(options.kv_dtype, options.kv_dtype))
    with progress.stage("passes"):
        graph = retarget(graph, options)
    with tempfile.TemporaryDirectory(prefix="planc-", dir=root.parent) as folder:
        home, kv = Path(folder), kv_of(graph, options)
        (home / "tokenizer").symlink_to((root / "tokenizer").resolve())
        made = generate(graph, options, home, progress.counter("kernels"))
        weights.write_constants(graph, home)
        weights.pack_weights(graph, source, home, options.tp, progress)
        twin = replace(plan, target=str(options.target), program=made.program, memory=made.memory(kv), kv=kv)
        found = measure(home, graph, twin, judge, options, progress)
    return measured_as(plan, found)


def measured_as(plan: schema.Plan, twin: schema.Plan) -> schema.Plan:
    """The plan with what was measured of another of the same weights and schemes."""
    return replace(plan, goldens=twin.goldens, accuracy=twin.accuracy, goldens_target=twin.goldens_target)


def with_errors(plan: schema.Plan, graph: Graph, source: ModelSource, ranks: int, progress: Progress) -> schema.Plan:
    """The plan with the error of each weight that it rounds, where it was judged."""
    if plan.accuracy.mean_kl is None or not quantized(graph):
        return plan
    with progress.stage("errors of weights"):
        found = errors(graph, source.read, source.read_rows, ranks)
    return replace(plan, accuracy=replace(plan.accuracy, weights=found))


def _score(
    root: Path,
    executor: Executor,
    plan: schema.Plan,
    judge: Judge | None,
    progress: Progress,
) -> tuple[tuple[schema.Golden, ...], schema.Accuracy]:
    scorer = Scorer(executor, plan.limits.max_num_seqs, plan.limits.max_num_batched_tokens)
    tokenizer = Tokenizer.load(root / "tokenizer")
    with progress.stage("goldens"):
        material = accuracy.generate(scorer, tokenizer.encode, plan.limits.max_model_len)
    _check_ids(material, plan.limits.vocab_size)
    if judge is None:
        return accuracy.unjudged(material)
    bar = progress.rows("reference", sum(len(s) for s in material.sequences))
    return accuracy.judge(material, scorer, judge.logits(material.sequences), "transformers f32", bar)


def _check_ids(material: accuracy.Material, vocab_size: int) -> None:
    top = max(max(s) for s in material.sequences)
    if top >= vocab_size:
        raise PlancError(f"the tokenizer makes token {top}, the model's vocabulary ends at {vocab_size - 1}.")
