"""Weights that are added later make the very plan that a build with them makes, or none."""

import json
import shutil
from pathlib import Path

import gguf
import pytest
from click.testing import CliRunner

from planc.cli import main
from planc.compiler import pack as packing
from planc.compiler.build import BuildRequest, build
from planc.compiler.pack import PackRequest, pack
from planc.compiler.progress import Progress
from planc.errors import PlancError, UsageError
from planc.plans import store
from planc.plans.check import check
from tests.compiler.source.gguf_files import write as write_gguf
from tests.compiler.test_rebind import without_weights
from tests.models import tiny
from tests.moe import MOE

SMALL = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64, "calib": "none"}

HOW = {"dtype": "int8", "tp": 2, "reference": "none"}


def built(model: Path, out: Path, **more: object) -> Path:
    with Progress(quiet=True) as progress:
        build(BuildRequest(str(model), out, **(SMALL | more)), progress)  # type: ignore[arg-type]
    return out


def packed(plan: Path, model: object, out: Path | None = None, **more: object) -> Path:
    with Progress(quiet=True) as progress:
        pack(PackRequest(plan, str(model), out, **({"reference": "none"} | more)), progress)  # type: ignore[arg-type]
    return out or plan


def contents(root: Path) -> dict[str, bytes]:
    """Every file of a plan but its log."""
    files = (p for p in root.rglob("*") if p.is_file() and p.name != store.LOG)
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in files}


def slow(*case: object) -> object:
    return pytest.param(*case, marks=pytest.mark.slow)


# Architecture, target, storage, ranks, dtype of the checkpoint, judge.
CASES = [
    ("llama", "sm_90a", "fp8", 1, "float16", "transformers"),
    slow("llama", "cpu", "f32", 2, "bfloat16", "transformers"),
    slow("mixtral", "cpu", "int8-wo", 2, "float32", "none"),
    slow("gemma2", "cpu", "bf16", 1, "bfloat16", "transformers"),
    slow("bloom", "cpu", "bf16", 2, "bfloat16", "none"),  # constants of which ranks take a part each
    slow("llama", "cpu", "int4-wo-g32", 1, "float16", "transformers"),
    slow("gpt2", "cpu", "int8", 2, "float32", "transformers"),
    slow("gpt_oss", "cpu", "int8-wo", 2, "bfloat16", "transformers"),
    slow("gpt2", "sm_80", "int8", 2, "float32", "transformers"),
    slow("mixtral", "sm_89", "bf16", 2, "bfloat16", "transformers"),
    slow("gemma2", "sm_120a", "int4-wo-g32", 1, "float32", "transformers"),
]


@pytest.mark.parametrize(("arch", "target", "dtype", "tp", "stored", "reference"), CASES)
def test_a_packed_plan_is_the_built_one(
    tmp_path: Path, arch: str, target: str, dtype: str, tp: int, stored: str, reference: str
) -> None:
    """The code is built from the config alone, which has nothing of the checkpoint's names, layouts and dtypes."""
    model = tiny(arch, tmp_path / "model", dtype=stored, **MOE.get(arch, {}))
    said = without_weights(model, tmp_path / "said")
    how = {"target": target, "dtype": dtype, "tp": tp, "reference": reference}
    plan = built(said, tmp_path / "plan", weights="none", **how)
    assert [f.name for f in check(plan) if not f.ok] == ["weights"]
    packed(plan, model, reference=reference)
    assert contents(plan) == contents(built(model, tmp_path / "built", **how))
    assert all(f.ok for f in check(plan))
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_gguf_file_into_a_plan_of_a_config(tmp_path: Path, dtype: str, kind: str) -> None:
    folder = tiny("qwen2", tmp_path / "model")
    write_gguf(folder, tmp_path / "m.gguf", gguf.GGMLQuantizationType[kind])
    plan = built(without_weights(folder, tmp_path), tmp_path / "plan", weights="none", dtype=dtype, reference="none")
    built(tmp_path / "m.gguf", tmp_path / "built", dtype=dtype, reference="none")
    assert contents(packed(plan, tmp_path / "m.gguf")) == contents(tmp_path / "built")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_the_codes_of_a_quantized_checkpoint(tmp_path: Path, kind: str) -> None:
    write_gguf(tiny("qwen2", tmp_path / "model"), tmp_path / "m.gguf", gguf.GGMLQuantizationType[kind])
    plan = built(tmp_path / "m.gguf", tmp_path / "plan", weights="none", reference="none")
    built(tmp_path / "m.gguf", tmp_path / "built", reference="none")
    assert contents(packed(plan, tmp_path / "m.gguf")) == contents(tmp_path / "built")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A llama, another trained from it, and one with another config."""
    root: Path = tmp_path_factory.mktemp("models")
    tiny("llama", root)
    tiny("llama", root, seed=1)
    tiny("llama", root, seed=2, rms_norm_eps=0.5)
    return root


@pytest.fixture(scope="module")
def plan(models: Path, tmp_path_factory) -> Path:
    """A plan of the first without weights, for two ranks."""
    return built(models / "llama-0", tmp_path_factory.mktemp("plan") / "plan", weights="none", **HOW)


def test_one_plan_takes_the_weights_of_every_model_of_its_kind(models: Path, plan: Path, tmp_path: Path) -> None:
    """Token ids and the like are the model's own; what the plan was built from need not be there."""
    before = contents(plan)
    other = tmp_path / "other"
    shutil.copytree(models / "llama-1", other)
    for name, changed in (("config.json", {"use_cache": False}), ("generation_config.json", {"eos_token_id": [2, 7]})):
        (other / name).write_text(json.dumps(json.loads((other / name).read_text()) | changed))
    first, second = packed(plan, models / "llama-0", tmp_path / "first"), packed(plan, other, tmp_path / "second")
    assert contents(plan) == before
    assert contents(first) == contents(built(models / "llama-0", tmp_path / "built", **HOW))
    kept = (store.load(first), store.load(second))
    assert [p.model.eos_token_ids for p in kept] == [(2,), (2, 7)]
    assert kept[0].model.fingerprint != kept[1].model.fingerprint
    assert contents(first)["weights/rank0.safetensors"] != contents(second)["weights/rank0.safetensors"]
    assert contents(first)["kernels/model.so"] == contents(second)["kernels/model.so"]


def planc(*args: object) -> tuple[int, str]:
    """Exit code and the last line of the output."""
    done = CliRunner().invoke(main, [*map(str, args)])
    return done.exit_code, done.output.strip().splitlines()[-1]


def test_what_cannot_be_packed_is_refused_in_one_line(models: Path, plan: Path, tmp_path: Path) -> None:
    model, before = models / "llama-0", contents(plan)
    assert planc("pack", tmp_path / "no", "--model", model)[1].endswith("Build one with `planc build`.")
    code, told = planc("pack", plan, "--model", tmp_path / "nowhere")
    assert (code, "nowhere does not exist" in told) == (1, True)
    code, told = planc("pack", plan, "--model", "llama-3-8b")
    assert (code, "config alone" in told) == (2, True)
    code, told = planc("pack", plan, "--model", models / "llama-2")
    assert code == 1
    assert f"llama-2: rms_norm_eps of its config is 0.5, {plan} was built for 1e-06. Pack llama-0" in told
    code, told = planc("pack", plan, "--model", model, "--reference", "none", "--max-kl", "1")
    assert (code, "need a reference" in told) == (2, True)
    (tmp_path / "there").mkdir()
    code, told = planc("pack", plan, "--model", model, "-o", tmp_path / "there")
    assert (code, "--force" in told) == (2, True)
    assert contents(plan) == before


def test_weights_are_not_packed_twice_nor_over_damage(models: Path, plan: Path, tmp_path: Path) -> None:
    mine = tmp_path / "plan"
    shutil.copytree(plan, mine)
    graph = (mine / store.GRAPH).read_bytes()
    (mine / store.GRAPH).write_bytes(graph + b"\n")
    with pytest.raises(PlancError, match=r"graph\.ir has changed since the build"):
        packed(mine, models / "llama-0")
    (mine / store.GRAPH).write_bytes(graph)
    packed(mine, models / "llama-0")
    with pytest.raises(PlancError, match=r"has weights already, those of llama-0.*--weights none"):
        packed(mine, models / "llama-1")
    with pytest.raises(UsageError, match="--force"):
        packed(plan, models / "llama-0", mine)
    packed(plan, models / "llama-1", mine, force=True)
    assert store.load(mine).model.name == "llama-1"


def test_an_interrupt_leaves_the_plan_as_it_was(models: Path, plan: Path, tmp_path: Path, monkeypatch) -> None:
    mine = tmp_path / "plan"
    shutil.copytree(plan, mine)
    wrote = packing.weights.pack_weights

    def interrupted(*args: object) -> None:
        wrote(*args)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(packing.weights, "pack_weights", interrupted)
    with pytest.raises(KeyboardInterrupt):
        packed(mine, models / "llama-0")
    assert contents(mine) == contents(plan)
    assert [p.name for p in tmp_path.iterdir()] == ["plan"]


def test_the_gate_stands_before_packing_too(models: Path, plan: Path, tmp_path: Path) -> None:
    """Rounded to nearest, where a build would have calibrated."""
    lines: list[str] = []
    before = contents(plan)
    with Progress(quiet=True) as progress, pytest.raises(PlancError, match=r"at most 1e-06.*was not packed.*--max-kl"):
        progress.say = lines.append  # type: ignore[method-assign]
        pack(PackRequest(plan, str(models / "llama-0"), tmp_path / "out", max_kl=1e-6), progress)
    assert "int8 is rounded to nearest here: `planc build` of this model calibrates it" in lines
    assert contents(plan) == before
    assert not (tmp_path / "out").exists()
