"""The gate in whole builds: what is too far is not published, what is told to pass passes, --auto-mixed does it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planc.compiler.accuracy import log_softmax
from planc.compiler.build import BuildRequest, build
from planc.compiler.ir.text import parse
from planc.compiler.probe import Probe
from planc.compiler.progress import Progress
from planc.compiler.source import open_source
from planc.compiler.weight_errors import quantized
from planc.errors import PlancError, UsageError
from planc.plans import store
from planc.plans.check import check
from planc.plans.diff import diff
from planc.plans.schema import Plan
from planc.plans.show import accuracy_rows
from planc.runtime.cpu import CpuExecutor
from planc.runtime.goldens import Scorer, verify
from tests.heard import Heard
from tests.models import tiny
from tests.moe import MOE


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny("llama", tmp_path_factory.mktemp("model"), num_hidden_layers=3)


@pytest.fixture(scope="module")
def request_of(model: Path):
    def made(out: Path, **changes: object) -> BuildRequest:
        plain = BuildRequest(
            str(model), out, dtype="int8-wo", max_model_len=64, max_num_seqs=16, max_num_batched_tokens=64
        )
        return replace(plain, **changes)  # type: ignore[arg-type]

    return made


@pytest.fixture(scope="module")
def plain(request_of, tmp_path_factory) -> Plan:
    """Of the scheme throughout, within the default limits."""
    return build(request_of(tmp_path_factory.mktemp("plan") / "plain"), Progress(quiet=True))


def test_the_manifest_tells_what_was_allowed_and_lost(plain: Plan) -> None:
    a = plain.accuracy
    assert a.mean_kl is not None
    assert a.most_kl is not None
    assert 0 < a.mean_kl < a.most_kl
    assert a.widened == ()
    named = {module for w in a.weights for module in w.modules}
    assert {"lm_head", "model.layers.0.mlp.down_proj", "model.layers.2.self_attn.q_proj"} <= named
    assert all(0.001 < w.error < 0.02 and w.scheme == "int8-wo" for w in a.weights)
    labels = dict(accuracy_rows(a))
    assert labels["error of int8-wo"].startswith("0.0")
    assert f"KL {a.most_kl:g} nats" in labels["allowed"]


def test_too_far_is_not_published_and_what_is_printed_passes(request_of, plain: Plan, tmp_path: Path) -> None:
    limit = plain.accuracy.mean_kl / 2
    heard = Heard()
    with pytest.raises(PlancError, match=r"so it was not published\. Worst: .*layers.*nats.*--auto-mixed") as refused:
        build(request_of(tmp_path / "plan", max_kl=limit), heard)
    assert str(refused.value).count(" nats)") == 5
    assert list(tmp_path.iterdir()) == []
    (config,) = [text for text in heard.said if text.startswith("{")]
    path = tmp_path / "mixed.json"
    path.write_text(config)
    mixed = build(request_of(tmp_path / "mixed", max_kl=limit, dtype="auto", quant_config=path), Progress(quiet=True))
    assert mixed.accuracy.mean_kl <= limit
    auto = build(request_of(tmp_path / "auto", max_kl=limit, auto_mixed=True), Progress(quiet=True))
    assert auto.accuracy.mean_kl == mixed.accuracy.mean_kl
    assert auto.goldens == mixed.goldens
    assert store.load(tmp_path / "auto").files["weights/rank0.safetensors"] == mixed.files["weights/rank0.safetensors"]
    assert [line for line in diff(tmp_path / "auto", tmp_path / "mixed") if "graph" in line or "weights/" in line] == []
    assert len(auto.accuracy.widened) == len(plain.accuracy.weights and _modules(plain)) - len(_modules(auto))
    _runs(tmp_path / "auto")


def _modules(plan: Plan) -> set[str]:
    return {module for w in plan.accuracy.weights for module in w.modules}


def _runs(out: Path) -> None:
    """The published plan is whole: its files are those of the manifest, and its own code gives its goldens."""
    assert [f for f in check(out) if not f.ok] == []
    plan = store.load(out)
    executor = CpuExecutor(out, plan, num_blocks=8)
    try:
        assert all(v.differs_at is None for v in verify(plan, executor))
    finally:
        executor.close()
    assert json.loads((out / "plan.json").read_text())["accuracy"]["widened"]


def test_perplexity_is_a_limit_of_its_own(request_of, tmp_path: Path) -> None:
    with pytest.raises(PlancError, match=r"perplexity .* \(at most \+0.00%\)"):
        build(
            request_of(tmp_path / "plan", max_ppl_increase="1e-9%", dtype="int8-wo", max_kl=1e-9), Progress(quiet=True)
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_kl": 0.0}, "--max-kl is 0"),
        ({"max_kl": float("nan")}, "--max-kl is nan"),
        ({"max_ppl_increase": "much"}, "--max-ppl-increase is 'much'"),
        ({"auto_mixed": True, "reference": "none"}, "need the weights and a reference"),
        ({"max_kl": 0.1, "weights": "none"}, "need the weights and a reference"),
    ],
)
def test_wrong_calls_are_told_before_any_work(request_of, tmp_path: Path, changes, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(request_of(tmp_path / "plan", **changes), Progress(quiet=True))


@pytest.mark.parametrize("arch", ["mixtral", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_probe_measures_what_a_build_of_that_module_alone_loses(arch: str, tmp_path_factory) -> None:
    """Rounded values in the place of a wide plan's own, against a plan in which just that weight is int8-wo."""
    folder = tmp_path_factory.mktemp("probe")
    source_of = tiny(arch, folder, **MOE.get(arch, {}))
    pattern = r"layers\.1\.(mlp\.down_proj|.*experts.*(w2|down_proj))"
    config = folder / "one.json"
    config.write_text(json.dumps({"default": "f32", "modules": {pattern: "int8-wo"}}))
    request = BuildRequest(
        str(source_of), folder / "wide", dtype="f32", max_model_len=64, max_num_seqs=16, max_num_batched_tokens=64,
        reference="none", kv_cache_dtype="f32",
    )  # fmt: skip
    wide = build(request, Progress(quiet=True))
    one = build(replace(request, out=folder / "one", dtype="auto", quant_config=config), Progress(quiet=True))
    ids = np.random.default_rng(0).integers(4, 330, 60).tolist()
    truth, rounded = (log_softmax(_logits(root, ids)) for root in (folder / "wide", folder / "one"))
    want = float((np.exp(truth) * (truth - rounded)).sum(-1).mean())
    graphs = [parse((folder / name / "graph.ir").read_text()) for name in ("wide", "one")]
    weights = quantized(graphs[1])
    assert len(weights) == 1
    with (
        open_source(str(source_of)) as source,
        Probe(folder / "wide", wide, graphs[0], graphs[1].constants, source.read, source.read_rows) as probe,
    ):
        (group,) = probe.measure(weights, ids, lambda n: None)
    assert group.weights == tuple(weights)
    assert one.options.dtype == "f32"
    assert group.kl == pytest.approx(want, rel=0.05, abs=2e-7)
    assert want > 1e-6


def _logits(root: Path, ids: list[int]) -> np.ndarray:
    plan = store.load(root)
    executor = CpuExecutor(root, plan, num_blocks=8)
    try:
        return Scorer(executor, plan.limits.max_num_seqs, plan.limits.max_num_batched_tokens).logits(ids, 0)
    finally:
        executor.close()
