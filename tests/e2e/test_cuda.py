"""Plans for GPUs: built here, their PTX run in the emulator by the real executor, beside the references."""

import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from planc.compiler import emulate_kernels
from planc.compiler.build import BuildRequest, build, build_each
from planc.compiler.emulate import whole
from planc.compiler.emulate_kernels import each_kernel
from planc.compiler.progress import Progress
from planc.emulator.run import allocated, emulated
from planc.errors import UsageError
from planc.plans import store
from planc.plans.check import check
from planc.plans.diff import diff
from planc.plans.launches import load, save
from planc.plans.ranks import SHARED, nbytes
from planc.runtime.cuda import CudaExecutor, arena_bytes
from planc.runtime.engine import Engine
from planc.runtime.scheduler import SchedulerLimits
from planc.runtime.sequence import SamplingParams
from planc.runtime.tokenizer import Tokenizer
from tests.emulator.counting import calls
from tests.models import tiny

MAX = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64, "reference": "none", "calib": "none"}
# Architecture, target, dtype and cache: between them every kind of product, mask, norm and router.
CASES = [
    ("llama", "sm_90a", "fp8", "bf16"),
    pytest.param("llama", "sm_100a", "fp8", "bf16", marks=pytest.mark.slow),  # test_tensor_memory has its products
    pytest.param("gemma2", "sm_89", "bf16", "int8", marks=pytest.mark.slow),
    pytest.param("gpt2", "sm_80", "int8", "bf16", marks=pytest.mark.slow),
    pytest.param("llama", "sm_120a", "awq-g32", "bf16", marks=pytest.mark.slow),
    pytest.param("mixtral", "sm_120a", "int8-wo", "bf16", marks=pytest.mark.slow),
    pytest.param("llama", "sm_80", "f32", "f32", marks=pytest.mark.slow),
    pytest.param("gemma2", "sm_90a", "int4-wo-g32", "bf16", marks=pytest.mark.slow),
    pytest.param("qwen3_moe", "sm_90a", "fp8", "bf16", marks=pytest.mark.slow),
    pytest.param("gpt_oss", "sm_90a", "bf16", "bf16", marks=pytest.mark.slow),
    pytest.param("gemma2", "sm_100a", "bf16", "int8", marks=pytest.mark.slow),
    pytest.param("gpt2", "sm_100a", "int8", "bf16", marks=pytest.mark.slow),
    pytest.param("mixtral", "sm_100a", "int8-wo", "bf16", marks=pytest.mark.slow),
    pytest.param("gpt_oss", "sm_100a", "bf16", "bf16", marks=pytest.mark.slow),
]


def built(model: Path, out: Path, **more: object) -> Path:
    with Progress(quiet=True) as progress:
        build(BuildRequest(str(model), out, **(MAX | more)), progress)  # type: ignore[arg-type]
    return out


@pytest.fixture(scope="module")
def weighted(model, tmp_path_factory) -> Callable[..., Path]:
    """A plan with weights by architecture, target, dtype and cache."""
    return cache(
        lambda arch, target, dtype, kv: built(
            model(arch), tmp_path_factory.mktemp("cuda") / "plan", target=target, dtype=dtype, kv_cache_dtype=kv
        )
    )


@pytest.mark.parametrize(("arch", "target", "dtype", "kv"), CASES)
def test_a_plan_computes_what_its_graph_says(weighted, arch: str, target: str, dtype: str, kv: str) -> None:
    root = weighted(arch, target, dtype, kv)
    plan = store.load(root)
    assert plan.goldens, "measured by a plan for this CPU"
    for seed in (1, 2):
        for verdict in whole(root, plan, seed):
            assert verdict.ok, f"{verdict.name}: {verdict.detail}"


class OnHost:
    """An executor that cannot choose tokens."""

    def __init__(self, executor: CudaExecutor) -> None:
        self.step, self.close = executor.step, executor.close
        self.num_blocks, self.block_size = executor.num_blocks, executor.block_size
        self.vocab_size = executor.vocab_size


def test_an_engine_gives_the_tokens_of_the_hosts_sampler(weighted) -> None:
    """Prompts in chunks beside decodes, with too few pages for all; a step is one copy in, and tokens out; logits leave
    the device for one sequence alone.
    """
    root = weighted("llama", "sm_90a", "fp8", "bf16")
    plan = store.load(root)
    penalties = {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "logit_bias": ((7, 2.0),)}
    ways = [
        {"temperature": 0},
        {"temperature": 0, **penalties},
        {"top_k": 20, "top_p": 0.9, **penalties},
        {"logprobs": 1},
    ]
    asked = [SamplingParams(max_tokens=4, seed=n, **way) for n, way in enumerate(ways)]  # type: ignore[arg-type]
    prompts = [[n + 1] * 3 + list(range(20, 20 + 9 * n)) for n in range(4)]
    found = []
    for on_device in (True, False):
        with emulated(root, plan, 6) as gpu:
            assert isinstance(gpu.executor, CudaExecutor)
            made = calls(gpu.executor.gpu)
            executor = gpu.executor if on_device else OnHost(gpu.executor)
            engine = Engine(executor, Tokenizer.load(root / "tokenizer"), SchedulerLimits(64, 4, 32))
            found.append([(o.token_ids, o.finish_reason) for o in engine.generate(prompts, asked)])
        if on_device:
            count = Counter(name for name, _ in made)
            assert count["cuMemcpyHtoDAsync"] == count["cuGraphLaunch"] > 4
            out = [nbytes for name, nbytes in made if name == "cuMemcpyDtoHAsync"]
            assert sorted(out)[-4:] == [4 * plan.limits.vocab_size] * 4
            assert sorted(out)[-5] <= 8 * 4, "a token and the bits of its logit, of four sequences"
            assert len(out) <= count["cuGraphLaunch"] + 4
    assert found[0] == found[1]


def test_penalties_that_do_not_wait_for_the_ids_of_tokens_are_caught(weighted, tmp_path: Path) -> None:
    root = tmp_path / "plan"
    shutil.copytree(weighted("llama", "sm_90a", "fp8", "bf16"), root)
    held, graphs = load(root), []
    for step in held.graphs:
        late = [n for n, launch in enumerate(step.launches) if launch.kernel.startswith("remember")]
        kept = [replace(x, deps=tuple(d for d in x.deps if d not in late)) for x in step.launches]
        assert kept != list(step.launches)
        graphs.append(replace(step, launches=tuple(kept)))
    save(root, replace(held, graphs=tuple(graphs)))
    with emulated(root, store.seal(root, store.load(root)), 6) as gpu:
        engine = Engine(gpu.executor, Tokenizer.load(root / "tokenizer"), SchedulerLimits(64, 4, 32))
        (output,) = engine.generate([[1, 2, 3]], SamplingParams(temperature=0, presence_penalty=1.0))
    assert re.search(r"\(remember\) and launch \d+ \(scan\) of a graph touch byte \d+ of buffer kv", output.error or "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "target", "dtype", "tp"), [("llama", "sm_89", "bf16", 2), ("mixtral", "sm_80", "f32", 2)]
)
def test_ranks_compute_what_their_graph_says(
    model, tmp_path: Path, arch: str, target: str, dtype: str, tp: int
) -> None:
    root = built(model(arch), tmp_path / "plan", target=target, dtype=dtype, tp=tp)
    plan = store.load(root)
    for seed in (1, 2):
        for verdict in whole(root, plan, seed):
            assert verdict.ok, f"{verdict.name}: {verdict.detail}"
    with emulated(root, plan, 6) as gpus:
        engine = Engine(gpus.executor, Tokenizer.load(root / "tokenizer"), SchedulerLimits(64, 4, 32))
        outputs = list(engine.generate([[1, 2, 3], [5] * 40], SamplingParams(temperature=0, max_tokens=4)))
    assert [o.error for o in outputs] == [None, None]
    assert [len(o.token_ids) for o in outputs] == [4, 4]


def test_kernels_of_a_plan_without_weights(model, tmp_path: Path) -> None:
    root = built(model("llama"), tmp_path / "plan", target="h100-sxm", dtype="fp8", tp=2, weights="none")
    plan = store.load(root)
    assert plan.limits.ranks == 2
    assert [e.step for e in plan.estimates] == ["decode", "decode", "prefill"]
    sizes, said = arena_bytes(load(root), 9 * plan.kv.page_bytes), plan.memory
    assert sizes[SHARED] == nbytes(2)
    assert allocated(root, plan, 9) == sum(sizes.values())
    assert sum(sizes.values()) == said.weights + said.constants + said.arena + 9 * plan.kv.page_bytes
    found = list(each_kernel(root, plan, seed=3))
    assert len(found) >= 10
    assert found[-1].name.startswith("token choice")
    assert {"all_reduce_one_shot of 2 ranks", "all_gather of 2 ranks"} <= {v.name.partition(":")[0] for v in found}
    assert all(v.ok for v in found), [v for v in found if not v.ok]


def test_a_wrong_kernel_is_found(model, tmp_path: Path, monkeypatch) -> None:
    """The text of the norm kernels has other constants: what they divide by is no longer the width."""
    root = built(model("llama"), tmp_path / "plan", target="sm_90a", weights="none")
    assert all(v.ok for v in each_kernel(root, store.load(root), seed=0))
    for norm in [b for b in load(root).binaries if b.name.startswith("norm")]:
        text = (root / norm.ptx).read_text()
        assert "sqrt.rn" in text
        (root / norm.ptx).write_text(re.sub(r"(\bsqrt\.rn\S*)(\s+)(%r\d+), (%r\d+);", r"mov.b32\2\3, \4;", text))
    wrong = [v.name for v in each_kernel(root, store.load(root), seed=0) if not v.ok]
    assert wrong
    assert all("norm" in name for name in wrong)
    monkeypatch.setattr(emulate_kernels, "execute", lambda *args: None)
    assert not [v.name for v in each_kernel(root, store.load(root), seed=0) if v.ok and "token choice" not in v.name]


@pytest.mark.slow
def test_kernels_of_features_with_second_digits(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path, intermediate_size=288)
    root = built(folder, tmp_path / "plan", target="sm_90a", dtype="fp8", calib="builtin", calib_tokens=1024)
    names = [v.name for v in each_kernel(root, store.load(root), seed=0) if v.ok]
    assert any("quantize" in name and "outliers32" in name for name in names), names
    assert all(v.ok for v in each_kernel(root, store.load(root), seed=1))


def test_several_targets_share_a_build_and_rebuild_to_the_bit(model, tmp_path: Path, monkeypatch) -> None:
    request = BuildRequest(str(model("llama")), tmp_path / "a", target="h100-sxm,a100-80g", weights="none", **MAX)
    with Progress(quiet=True) as progress:
        made = build_each(request, progress)
    assert [p.relative_to(tmp_path / "a").as_posix() for p in made] == ["h100-sxm", "a100-80g"]
    assert {load(p).sm for p in made} == {90, 80}
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path / "cold"))
    again = built(model("llama"), tmp_path / "elsewhere" / "b", target="h100-sxm", weights="none")
    assert diff(tmp_path / "a" / "h100-sxm", again) == []
    findings = check(again)
    assert any("h100-sxm" in f.detail for f in findings)


def test_what_cannot_be_is_refused_before_any_work(model, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a100-80g is sm_80.*int8"):
        built(model("llama"), tmp_path / "p", target="a100-80g", dtype="fp8")
    with pytest.raises(UsageError, match="did you mean h100-sxm"):
        built(model("llama"), tmp_path / "p", target="h100-smx")
    assert not (tmp_path / "p").exists()
