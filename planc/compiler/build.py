"""The whole compile in order: in goes a request, out comes a published plan directory."""

import platform
import resource
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import planc
from planc.codegen import target as targets
from planc.codegen.target import Target
from planc.compiler import accuracy, facts, gate, tuned, weights
from planc.compiler.backends import check_tools, generate, kv_of
from planc.compiler.calibrate import BUILTIN, LEAST, TOKENS, calibrate_model, calibration_text
from planc.compiler.ir.graph import Graph
from planc.compiler.ir.ops import APPENDS
from planc.compiler.ir.text import to_text
from planc.compiler.measure import judge_of, measure, measure_twin, measured_as, with_errors
from planc.compiler.mixed import Attempt, passing
from planc.compiler.progress import Progress
from planc.compiler.reference import Judge
from planc.compiler.source import ModelSource, open_source, record
from planc.compiler.source.base import most_positions
from planc.compiler.storage import check_kernels, storage, used
from planc.errors import PlancError, UsageError
from planc.passes.choices import Choices
from planc.passes.options import Options
from planc.passes.pipeline import run as run_passes
from planc.passes.schemes import QuantConfig
from planc.passes.shard import replicated
from planc.plans import schema, store
from planc.plans.tuning import Tuning
from planc.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_MADE_WITH = ("torch", "transformers", "tokenizers", "numpy")
KV_DTYPES = {"f32": "f32", "bf16": "bf16", "fp8": "f8e3m4", "int8": "i8"}  # --kv-cache-dtype -> elements of the cache


@dataclass(frozen=True)
class BuildRequest:
    """What `planc build` was asked for; None where the model or the target decides."""

    model: str
    out: Path
    dtype: str = "auto"
    quant_config: Path | None = None
    target: str = "cpu"
    tp: int = 1
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    weights: str = "pack"
    seed: int = 0
    reference: str = "transformers"
    calib: str = BUILTIN
    calib_tokens: int = TOKENS
    max_kl: float | None = None
    max_ppl_increase: str | None = None
    auto_mixed: bool = False
    tuning: Path | None = None
    revision: str | None = None
    allow_pickle: bool = False
    trust_remote_code: bool = False
    force: bool = False
    dump_dir: Path | None = None


def build(request: BuildRequest, progress: Progress) -> schema.Plan:
    """Compiles the model and publishes the plan at `request.out`, whole or not at all.

    Raises UsageError for a request that contradicts itself or the model, PlancError for a model that does not compile.
    """
    return next(iter(build_each(request, progress).values()))


def build_each(request: BuildRequest, progress: Progress) -> dict[Path, schema.Plan]:
    """The plan of each target that `request.target` names, by where it lies: `request.out` if it is one, else a folder
    in it that is named as the target. They share the trace, the calibration and the measurement.

    A plan is published as soon as it is whole. Errors as `build` has them.
    """
    _check_request(request)
    places = _places(request)
    for target, out in places.items():
        store.check_free(out, force=request.force)
        check_tools(target)
    tuning = tuned.read(request.tuning, places)
    with open_source(
        request.model,
        allow_pickle=request.allow_pickle,
        revision=request.revision,
        trust_remote_code=request.trust_remote_code,
        weights=request.weights == "pack",
    ) as source:
        config = source.config()
        quant = storage(request.dtype, request.quant_config, source, places)
        for target in places:
            targets.check_dtypes(target, used(quant), _kv_cache_dtype(request))
            check_kernels(quant, target)
        wanted = {target: _options(request, config, target, quant, tuning) for target in places}
        job = _lift(source, config, next(iter(wanted.values())), request, progress)
        made: dict[Path, schema.Plan] = {}
        for target, options in wanted.items():
            job, made[places[target]] = _published(job, options, places[target])
        return made


def _places(request: BuildRequest) -> dict[Target, Path]:
    """Where the plan of each target goes."""
    names = [name.strip() for name in request.target.split(",")]
    parsed = {targets.parse(name): name for name in names}
    if len(parsed) < len(names):
        raise UsageError(f"--target {request.target} names a target twice.")
    if len(parsed) == 1:
        return {next(iter(parsed)): request.out}
    return {target: request.out / str(target).replace(":", "-").removeprefix("cuda-") for target in parsed}


def _published(job: "_Job", options: Options, out: Path) -> tuple["_Job", schema.Plan]:
    """The plan of one target, sealed and in its place, and the job with what other targets' plans can use again."""
    request, source, progress = job.request, job.source, job.progress
    with store.publish(out, force=request.force) as root:
        tokenizer = facts.tokenizer_of(source, root / "tokenizer", progress)
        if tokenizer is not None:
            job, options = job.calibrated(options, tokenizer)
        first = job.make(root, options, measured=False)
        if tokenizer is not None and request.weights == "pack":
            first = job.measured(root, first)
            text = tokenizer.encode(accuracy.EVAL_TEXT.read_text(encoding="utf-8"))
            first = passing(first, _most(request, options), root, job.make, source, text, request.auto_mixed, progress)
        sealed = store.seal(root, first.plan)
        store.write_log(root, progress.seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return job, sealed


def _check_request(request: BuildRequest) -> None:
    for name in ("max_num_seqs", "max_num_batched_tokens", "tp"):
        if getattr(request, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(request, name)}.")
    if request.max_num_batched_tokens < request.max_num_seqs:
        raise UsageError(
            f"--max-num-batched-tokens {request.max_num_batched_tokens} is less than --max-num-seqs "
            f"{request.max_num_seqs}: a step must hold a token of every sequence."
        )
    if request.block_size % 16 or not 16 <= request.block_size <= 256:
        raise UsageError(f"--block-size must be a multiple of 16 from 16 to 256, got {request.block_size}.")
    if request.calib_tokens < LEAST:
        raise UsageError(f"--calib-tokens must be at least {LEAST}, got {request.calib_tokens}.")
    asked = request.max_kl is not None or request.max_ppl_increase is not None or request.auto_mixed
    if asked and (request.reference == "none" or request.weights == "none"):
        raise UsageError(
            "--max-kl, --max-ppl-increase and --auto-mixed need the weights and a reference to measure by."
        )
    gate.check_asked(request.max_kl, request.max_ppl_increase)
    if request.auto_mixed and request.tp > 1:
        raise UsageError(
            "--auto-mixed measures single modules of a plan of one rank: build with --tp 1, and give what it widened "
            "to --tp in a --quant-config."
        )


def _most(request: BuildRequest, options: Options) -> gate.Limits:
    """What the build may lose."""
    return gate.asked(options.storage, _kv_cache_dtype(request), request.max_kl, request.max_ppl_increase)


def _options(
    request: BuildRequest, config: "PretrainedConfig", target: Target, quant: QuantConfig, tuning: Tuning | None
) -> Options:
    dtypes = targets.KV_FLAGS if target.kind == "cuda" else KV_DTYPES
    kv = dtypes[_kv_cache_dtype(request)]
    return Options(
        target=target,
        dtype=quant.default,
        quant=quant,
        kv_dtype=kv,
        max_model_len=_max_model_len(request.max_model_len, config),
        max_num_seqs=request.max_num_seqs,
        max_num_batched_tokens=request.max_num_batched_tokens,
        block_size=request.block_size,
        tp=request.tp,
        tuning=tuning,
    )


def _kv_cache_dtype(request: BuildRequest) -> str:
    if request.kv_cache_dtype != "auto":
        return request.kv_cache_dtype
    return "f32" if request.dtype == "f32" else "bf16"


def _max_model_len(asked: int | None, config: "PretrainedConfig") -> int:
    limit = most_positions(config)
    if asked is not None and asked < 2:
        raise UsageError(f"--max-model-len must be at least 2, got {asked}.")
    if asked is not None and limit is not None and asked > limit:
        raise UsageError(f"--max-model-len {asked} is more than the model's {limit} positions; use at most {limit}.")
    if limit is not None and limit < 2:
        raise PlancError(f"the model's config has room for {limit} position; it must be at least 2.")
    if asked is None and limit is None:
        raise UsageError("the model's config names no longest sequence; give --max-model-len.")
    return asked or int(limit or 0)


def _lift(
    source: ModelSource, config: "PretrainedConfig", options: Options, request: BuildRequest, progress: Progress
) -> "_Job":
    """Traces and lifts the model: what every attempt to build it starts from."""
    from planc.compiler.gates import self_test
    from planc.compiler.lift import lift
    from planc.compiler.source.bind import Binding, bind
    from planc.compiler.trace import trace

    facts.say_source(source, config, progress)
    facts.say_storage(source, options.storage, progress)
    with progress.stage("trace"):
        bindings: list[Binding] = []  # bound before the trace: a tie that the checkpoint breaks must not be traced
        traced = trace(
            config,
            limit=options.max_model_len,
            prepare=lambda model: bindings.append(bind(model, source)),
            trust_remote_code=request.trust_remote_code,
        )
        (binding,) = bindings
    for path in traced.regimes:
        progress.say(f"{path} depends on the length of a sequence: fixed for {options.max_model_len} tokens")
    facts.say_binding(binding, progress)
    with progress.stage("lift"):
        graph = lift(traced, binding.recipes)
    with progress.stage("self-test"):
        self_test(config, request.trust_remote_code, options.max_model_len)
    parameters = sum(p.numel() for p in traced.module.parameters())
    info = facts.model_info(source, config, parameters, binding.unused, traced.regimes)
    return _Job(source, request, progress, graph, info)


@dataclass(frozen=True)
class _Job:
    """A lifted model on its way to a plan. More than one attempt may be made of it."""

    source: ModelSource
    request: BuildRequest
    progress: Progress
    lifted: Graph
    info: schema.ModelInfo
    calibration: schema.Calibration | None = None
    choices: Choices | None = None
    _measured: dict[str, schema.Plan] = field(default_factory=dict)  # plans for this CPU by storage of weights

    @cached_property
    def judge(self) -> Judge | None:
        if self.request.reference == "none":
            return None
        return judge_of(self.source, _max_model_len(self.request.max_model_len, self.source.config()))

    def calibrated(self, options: Options, tokenizer: Tokenizer) -> "tuple[_Job, Options]":
        """The job and options with what calibration chose, where a scheme profits from it."""
        if self.request.calib == "none" or self.request.weights == "none":
            return self, options
        if self.choices is None:
            text = partial(calibration_text, self.request.calib, tokenizer, self.request.calib_tokens)
            whole = replace(options, tp=1)
            choices, found = calibrate_model(self.lifted, self.source, whole, text, self.progress)
            self = replace(self, calibration=found, choices=choices)
        choices = self.choices or Choices()
        if options.tp > 1 and (choices.clips or choices.shifts or choices.outliers):
            self.progress.say("ranges that calibration found belong to whole weights: parts of ranks have their own")
            choices = choices.of_parts()
        return self, replace(options, choices=choices)

    def make(self, root: Path, options: Options, measured: bool) -> Attempt:
        """Another attempt, in a directory of its own."""
        attempt = self.write(root, *self.passes(options), options)
        return self.measured(root, attempt) if measured else attempt

    def passes(self, options: Options) -> tuple[Graph, tuple[schema.PassLog, ...]]:
        with self.progress.stage("passes"):
            graph, log = run_passes(self.lifted, options, dump=self.request.dump_dir)
        if not any(n.op in APPENDS for n in graph.nodes):
            raise PlancError("the model has no attention layer, so there is nothing to serve; check its config.")
        return graph, log

    def write(self, root: Path, graph: Graph, log: tuple[schema.PassLog, ...], options: Options) -> Attempt:
        plan = _write(root, graph, log, self.info, self.source, options, self.request, self.progress)
        return Attempt(options, graph, replace(plan, calibration=_calibration(self.calibration, log, options)))

    def measured(self, root: Path, attempt: Attempt) -> Attempt:
        options = attempt.options
        if options.target.kind == "cuda":
            plan = self._measured_by_twin(root, attempt)
        else:
            plan = measure(root, attempt.graph, attempt.plan, self.judge, options, self.progress)
        return replace(attempt, plan=with_errors(plan, attempt.graph, self.source, options.tp, self.progress))

    def _measured_by_twin(self, root: Path, attempt: Attempt) -> schema.Plan:
        """A GPU's plan has its goldens and accuracy from a plan of the same weights and schemes for this CPU."""
        options = attempt.options
        stored = repr(options.storage)  # all else is the same for every target of a request
        if stored not in self._measured:
            self._measured[stored] = measure_twin(
                root, attempt.graph, attempt.plan, self.source, self.judge, options, self.progress
            )
        return measured_as(attempt.plan, self._measured[stored])


def _write(
    root: Path,
    graph: Graph,
    log: tuple[schema.PassLog, ...],
    info: schema.ModelInfo,
    source: ModelSource,
    options: Options,
    request: BuildRequest,
    progress: Progress,
) -> schema.Plan:
    """Writes graph, kernels and weights below `root`."""
    (root / store.GRAPH).write_text(to_text(graph))
    made = generate(graph, options, root, progress.counter("kernels"))
    if options.tuning:
        progress.say(tuned.said(options.tuning, options.target, made))
    weights.write_constants(graph, root)
    record.write(source.config(), root)
    whole = replicated(graph) if options.tp > 1 else ()
    if whole:
        progress.say(f"every rank holds {len(whole)} products whole, first {whole[0]}")
    if request.weights == "pack":
        weights.pack_weights(graph, source, root, options.tp, progress)
    else:
        weights.write_leaves(graph, root)
    return schema.Plan(
        model=info,
        target=str(options.target),
        options=schema.Options(
            options.dtype, _kv_cache_dtype(request), options.block_size, request.weights, request.seed
        ),
        limits=_limits(graph, options),
        kv=kv_of(graph, options),
        memory=made.memory(kv_of(graph, options)),
        program=made.program,
        kernels=made.kernels,
        estimates=made.estimates,
        tiles=made.tiles,
        blockings=made.blockings,
        tuning=options.tuning.sha256 if options.tuning else None,
        weight_files=(weights.CONSTANTS_FILE, *(weights.rank_files(options.tp) if request.weights == "pack" else ())),
        goldens=(),
        goldens_target=None,
        accuracy=schema.Accuracy(reference="none"),
        passes=log,
        replicated=whole,
        made_with={"planc": planc.__version__, "python": platform.python_version()}
        | {name: version(name) for name in _MADE_WITH}
        | made.made_with,
    )


def _calibration(
    found: schema.Calibration | None, log: tuple[schema.PassLog, ...], options: Options
) -> schema.Calibration | None:
    """What was found, with the scales that a plan of ranks took of it: those whose vector no rank has a part of."""
    if found is None or options.tp == 1:
        return found
    return replace(found, scaled=next(p.matches for p in log if p.name == "migrate"))


def _limits(graph: Graph, options: Options) -> schema.Limits:
    vocab = graph.types[graph.outputs[0]].shape[-1]
    return schema.Limits(
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        vocab_size=int(vocab),
        ranks=options.tp,
    )
