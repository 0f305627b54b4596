"""`planc pack`: in go a plan that was built without weights and a model, out comes the plan that a build of that model
gives, with nothing traced and nothing compiled.
"""

import resource
import shutil
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from planc.codegen import target as targets
from planc.compiler import facts, gate, weights
from planc.compiler.calibrate.search import profiting
from planc.compiler.ir import text
from planc.compiler.ir.graph import Graph
from planc.compiler.measure import judge_of, measure, measure_twin, with_errors
from planc.compiler.progress import Progress
from planc.compiler.rebind import rebind
from planc.compiler.source import ModelSource, bind, new_model, open_source, record
from planc.compiler.source.base import part_of
from planc.errors import PlancError, UsageError
from planc.passes.options import Options
from planc.passes.schemes import QuantConfig
from planc.plans import schema, store
from planc.plans.check import check_files

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from planc.compiler.source.bind import Binding


@dataclass(frozen=True)
class PackRequest:
    """What `planc pack` was asked for."""

    plan: Path
    model: str
    out: Path | None = None
    reference: str = "transformers"
    max_kl: float | None = None
    max_ppl_increase: str | None = None
    revision: str | None = None
    allow_pickle: bool = False
    trust_remote_code: bool = False
    force: bool = False


def pack(request: PackRequest, progress: Progress) -> schema.Plan:
    """Publishes the plan with the model's weights, in its own place or at `request.out`, whole or not at all.

    PlancError when the plan has weights or is not whole, when the model is another than the plan was built for, naming
    the first difference, and when the plan with these weights loses more than its scheme should; UsageError when it
    cannot be written there.
    """
    _check_request(request)
    plan = store.load(request.plan)
    out = _place(request)
    _check_plan(request.plan, plan)
    with open_source(
        request.model,
        allow_pickle=request.allow_pickle,
        revision=request.revision,
        trust_remote_code=request.trust_remote_code,
    ) as source:
        job = _job(request, plan, source, progress)
        with store.publish(out, force=True) as root:
            made = job.write(root)
            sealed = store.seal(root, made)
            store.write_log(root, progress.seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
            return sealed


def _check_request(request: PackRequest) -> None:
    if request.reference == "none" and (request.max_kl is not None or request.max_ppl_increase is not None):
        raise UsageError("--max-kl and --max-ppl-increase need a reference to measure by.")
    gate.check_asked(request.max_kl, request.max_ppl_increase)


def _place(request: PackRequest) -> Path:
    """Where the packed plan goes: a plan gives way to itself without being asked."""
    out = request.out or request.plan
    store.check_free(out, force=request.force or out.resolve() == request.plan.resolve())
    return out


def _check_plan(root: Path, plan: schema.Plan) -> None:
    if plan.has_weights:
        raise PlancError(
            f"{root} has weights already, those of {plan.model.name}. Build one with --weights none, and keep it: -o "
            "packs it elsewhere, once for each model of its kind."
        )
    for finding in check_files(root, plan):
        if not finding.ok:
            raise PlancError(f"{root}: {finding.detail}.")


def _job(request: PackRequest, plan: schema.Plan, source: ModelSource, progress: Progress) -> "_Job":
    """What there is to pack, after all that can be refused without reading a weight."""
    config = source.config()
    _check_config(request, plan, source, ())
    facts.say_source(source, config, progress)
    with progress.stage("tensors"):
        stored = text.read(request.plan / store.GRAPH)
        model = new_model(config, trust_remote_code=request.trust_remote_code)
        _check_config(request, plan, source, record.counting(model))
        binding = bind(model, source)
        graph = rebind(stored, binding, source)
        graph = replace(graph, constants=weights.read_constants(graph, request.plan))
    facts.say_binding(binding, progress)
    return _Job(request, plan, source, config, binding, graph, progress)


def _check_config(request: PackRequest, plan: schema.Plan, source: ModelSource, counting: tuple[str, ...]) -> None:
    found = record.first_difference(record.read(request.plan), record.recorded(source.config()), counting)
    if found is None:
        return
    key, was, now = found
    by, here = plan.made_with["transformers"], version("transformers")
    told = "" if by == here else f" by transformers {by} (this is {here})"
    raise PlancError(
        f"{source.path}: {key} of its config is {now!r}, {request.plan} was built{told} for {was!r}. Pack "
        f"{plan.model.name} or a model trained from it, or build a plan of this one: planc build --model "
        f"{request.model}."
    )


@dataclass(frozen=True)
class _Job:
    """A plan, the model that it takes its weights from, and its graph over that model's tensors."""

    request: PackRequest
    plan: schema.Plan
    source: ModelSource
    config: "PretrainedConfig"
    binding: "Binding"
    graph: Graph
    progress: Progress

    def write(self, root: Path) -> schema.Plan:
        """The packed plan below `root`, measured."""
        self._copy(root)
        facts.tokenizer_of(self.source, root / "tokenizer", self.progress)
        weights.pack_weights(self.graph, self.source, root, self.plan.limits.ranks, self.progress)
        return self._measured(root, self._packed())

    def _copy(self, root: Path) -> None:
        """What does not depend on the weights, and what is told of the model."""
        for name in self.plan.files:
            if name not in (weights.LEAVES_FILE, store.GRAPH, record.FILE) and not name.startswith("tokenizer/"):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.request.plan / name, root / name)
        (root / store.GRAPH).write_text(text.to_text(self.graph))
        record.write(self.config, root)

    def _packed(self) -> schema.Plan:
        """The manifest with what packing changes: the model, and that its weights are there."""
        was = self.plan.model
        parts = (was.num_parameters, self.binding.unused, was.fixed_regimes)
        return replace(
            self.plan,
            model=facts.model_info(self.source, self.config, *parts),
            options=replace(self.plan.options, weights="pack"),
            weight_files=(weights.CONSTANTS_FILE, *weights.rank_files(self.plan.limits.ranks)),
        )

    def _measured(self, root: Path, plan: schema.Plan) -> schema.Plan:
        """With goldens and accuracy, as a build has them; PlancError when that is more than the scheme may lose."""
        options, quant = _options(plan), storage_of(self.graph, plan, self.source)
        for scheme in sorted(filter(profiting, quant.said - {*quant.native.values()})):
            self.progress.say(f"{scheme} is rounded to nearest here: `planc build` of this model calibrates it")
        judged = self.request.reference != "none"
        if options.target.kind == "cuda" and not judged:
            self.progress.say("no goldens: --reference none leaves out the plan for this CPU that would make them")
            return plan
        judge = judge_of(self.source, plan.limits.max_model_len) if judged else None
        if options.target.kind == "cuda":
            plan = measure_twin(root, self.graph, plan, self.source, judge, options, self.progress)
        else:
            plan = measure(root, self.graph, plan, judge, options, self.progress)
        plan = with_errors(plan, self.graph, self.source, options.tp, self.progress)
        most = gate.asked(quant, plan.options.kv_cache_dtype, self.request.max_kl, self.request.max_ppl_increase)
        if most.excess(plan.accuracy) > 1:
            raise gate.refuse_packed(plan.accuracy, most, plan.options.dtype)
        return replace(plan, accuracy=gate.allowed(plan.accuracy, most))


def _options(plan: schema.Plan) -> Options:
    """The options that the plan was built with, as far as anything after the passes asks for them."""
    return Options(
        target=targets.parse(plan.target),
        dtype=plan.options.dtype,
        kv_dtype=plan.kv.dtype,
        max_model_len=plan.limits.max_model_len,
        max_num_seqs=plan.limits.max_num_seqs,
        max_num_batched_tokens=plan.limits.max_num_batched_tokens,
        block_size=plan.kv.block_size,
        tp=plan.limits.ranks,
    )


def storage_of(graph: Graph, plan: schema.Plan, source: ModelSource) -> QuantConfig:
    """The schemes and dtypes that the graph stores weights in, and those of them that are the checkpoint's own."""
    schemes = {str(n.attr("scheme")) for n in graph.nodes if "scheme" in dict(n.attrs)}
    wide = {w.value.type.dtype for w in graph.weights if w.recipe.loads} & {"bf16"}
    parts = {part_of(name)[0] for w in graph.weights for name in w.recipe.loads if part_of(name)[1]}
    native = {name: source.native[name] for name in sorted(parts)}
    return QuantConfig(plan.options.dtype, kinds={name: name for name in sorted(schemes | wide)}, native=native)
