"""Builds as a user runs them: bit-equal again, refused with one clear line, never half-written."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from planc.cli import main
from planc.plans import store
from planc.plans.check import check
from planc.plans.diff import diff
from planc.plans.host import missing_flags
from planc.plans.show import fold_layers
from tests.models import tiny

SMALL = ("--dtype", "f32", "--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--reference", "none")
ISAS = ("cpu:x86-64-v3+avxvnni", "cpu:x86-64-v4+vnni+bf16", "cpu:x86-64-v4+amx")


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def planc(*args: object) -> Done:
    """Runs a command in this process, as the console script would: heavy imports are paid once."""
    result = CliRunner().invoke(main, [*map(str, args)], prog_name="planc")
    return Done(result.exit_code, result.stdout, result.stderr)


def planc_process(*args: object, **env: str) -> Done:
    """Runs a command in a process of its own."""
    command = [sys.executable, "-m", "planc", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | env)
    return Done(done.returncode, done.stdout, done.stderr)


def build(model: Path, out: Path, *flags: object) -> Done:
    return planc("build", "--model", model, "-o", out, *SMALL, *flags)


def refused(done: Done, code: int, *words: str) -> None:
    """One line on stderr, no traceback, the exit code, and all the words."""
    assert done.returncode == code, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in last, last


def test_the_same_inputs_give_the_same_bytes(model, plan, tmp_path: Path) -> None:
    first = plan("llama")
    moved = tmp_path / "elsewhere" / "llama-0"
    shutil.copytree(model("llama"), moved)
    flags = ("--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--reference", "none", "--dtype", "f32")
    cold = planc_process(
        "build", "--model", moved, "-o", tmp_path / "again", *flags, PLANC_CACHE_DIR=str(tmp_path / "cache")
    )
    assert cold.returncode == 0, cold.stderr
    assert diff(first, tmp_path / "again") == []
    for path in sorted(p for p in first.rglob("*") if p.is_file() and p.name != "build.json"):
        assert path.read_bytes() == (tmp_path / "again" / path.relative_to(first)).read_bytes(), path
    done = planc("diff", first, tmp_path / "again")
    assert (done.returncode, done.stdout) == (0, "identical\n")


def test_a_reference_pass_writes_margins_and_distance(model, tmp_path: Path) -> None:
    out = tmp_path / "plan"
    done = planc("build", "--model", model("qwen2"), "-o", out, *SMALL[:-2], "--dump-dir", tmp_path / "dump")
    assert done.returncode == 0, done.stderr
    made = store.load(out)
    assert made.accuracy.tokens == 1024
    assert made.accuracy.mean_kl == 0
    assert made.accuracy.top1_agreement == 1
    assert made.accuracy.perplexity == made.accuracy.reference_perplexity
    assert len(made.goldens) == 4
    for golden in made.goldens:
        assert len(golden.tokens) == len(golden.margins) == 16
        assert all(golden.reference_agrees)
        assert min(golden.margins) > 0
    assert [p.name for p in sorted((tmp_path / "dump").iterdir())][:3] == ["00-lift.ir", "01-dedupe.ir", "02-fold.ir"]


def test_inspect_check_verify_and_prompt(plan) -> None:
    path = plan("llama")
    shown = planc("inspect", path)
    assert shown.returncode == 0
    for word in ("LlamaForCausalLM", "KV cache of a token", "planc_paged_attention", "Goldens", "not measured"):
        assert word in shown.stdout
    assert json.loads(planc("inspect", path, "--json").stdout)["limits"]["max_model_len"] == 256
    graph = planc("inspect", path, "--graph").stdout
    assert graph == fold_layers((path / "graph.ir").read_text())
    assert "layer 1: the same as the layer above" in graph
    assert planc("check", path).returncode == 0
    verified = planc("verify", path)
    assert verified.returncode == 0
    assert verified.stdout.count("equal") == 4
    answer = planc("run", path, "--prompt", "hello", "--max-tokens", "4")
    assert answer.returncode == 0, answer.stderr


def test_a_flipped_byte_and_a_changed_golden_are_found(plan, tmp_path: Path) -> None:
    path = tmp_path / "plan"
    shutil.copytree(plan("llama"), path)
    weights = path / "weights/rank0.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 0x40
    weights.write_bytes(data)
    done = planc("check", path)
    assert done.returncode == 1
    assert "FAIL files: weights/rank0.safetensors has changed" in done.stdout
    made = store.load(path)
    changed = replace(made.goldens[1], tokens=(*made.goldens[1].tokens[:3], 7, *made.goldens[1].tokens[4:]))
    store.seal(path, replace(made, goldens=(made.goldens[0], changed, *made.goldens[2:])))
    done = planc("verify", path)
    assert done.returncode == 1
    assert "differs at token 3" in done.stdout


def test_a_plan_for_another_isa_is_built_and_checked_here_but_not_run(model, tmp_path: Path) -> None:
    target = next((t for t in ISAS if missing_flags(t)), None)
    if target is None:
        pytest.skip("this CPU runs every ISA that planc builds for")
    out = tmp_path / "plan"
    done = build(model("llama"), out, "--target", target)
    assert done.returncode == 0, done.stderr
    made = store.load(out)
    assert made.goldens_target != made.target  # made by a library for this CPU from the same weights
    assert all(len(g.tokens) == 16 for g in made.goldens)
    assert [f.name for f in check(out) if not f.ok] == ["target"]
    refused(planc("run", out, "--prompt", "x"), 1, missing_flags(target)[0], "--target cpu")


def test_the_portable_target_gives_the_same_goldens(model, plan, tmp_path: Path) -> None:
    out = tmp_path / "plan"
    done = build(model("llama"), out, "--target", "cpu:portable")
    assert done.returncode == 0, done.stderr
    assert [g.tokens for g in store.load(out).goldens] == [g.tokens for g in store.load(plan("llama")).goldens]


def test_code_without_weights(model, tmp_path: Path) -> None:
    out = tmp_path / "plan"
    done = build(model("llama"), out, "--weights", "none")
    assert done.returncode == 0, done.stderr
    assert not (out / "weights/rank0.safetensors").exists()
    assert [f.name for f in check(out) if not f.ok] == ["weights"]
    refused(planc("run", out, "--prompt", "x"), 1, "--weights none")
    refused(planc("verify", out), 1, "--weights none")


def test_usage_errors_exit_2_before_any_work(model, plan, tmp_path: Path) -> None:
    path, out = model("llama"), tmp_path / "plan"
    refused(build(path, plan("llama")), 2, "exists", "--force")
    refused(build(path, out, "--target", "cpu:x86-64-v9"), 2, "x86-64-v9", "x86-64-v3")
    refused(build(path, out, "--max-model-len", 99999), 2, "99999", "256")
    refused(build(path, out, "--block-size", 12), 2, "--block-size", "12")
    refused(build(path, out, "--max-num-seqs", 0), 2, "--max-num-seqs")
    refused(build(path, out, "--max-num-batched-tokens", 8), 2, "--max-num-batched-tokens")
    refused(planc("build", "--model", path, "--dtype", "fp3"), 2, "fp3")
    refused(planc("run", plan("llama"), "--port", 70000), 2, "70000")
    assert not out.exists()


def test_models_that_do_not_fit_are_refused_by_name(model, tmp_path: Path) -> None:
    out = tmp_path / "plan"
    refused(build(tmp_path / "nowhere", out), 1, "nowhere")
    broken = tmp_path / "broken"
    shutil.copytree(model("llama"), broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    refused(build(broken, out), 1, "model.layers.2.")
    (broken / "config.json").write_text(json.dumps(config | {"intermediate_size": 100}))
    refused(build(broken, out), 1, "down_proj", "[64, 96], expected [64, 100]")
    (broken / "config.json").write_text(json.dumps(config | {"model_type": "quux"}))
    refused(build(broken, out), 1, "quux")
    (broken / "config.json").write_text(json.dumps(config))
    weights = next(broken.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(build(broken, out), 1, weights.name)
    assert not out.exists()
    assert not list(tmp_path.glob(".plan*"))


def test_an_op_that_cannot_be_lifted_is_named_with_its_module(tmp_path: Path) -> None:
    """A model with recurrent state traces, or not, but is never compiled wrong."""
    done = build(tiny_mamba(tmp_path), tmp_path / "plan", "--max-model-len", 128)
    refused(done, 1)
    assert not (tmp_path / "plan").exists()


def tiny_mamba(folder: Path) -> Path:
    from transformers import AutoConfig

    path = tiny("llama", folder)
    config = AutoConfig.for_model(
        "mamba2", hidden_size=64, num_hidden_layers=2, state_size=16, num_heads=8, head_dim=16, n_groups=1,
        vocab_size=330,
    )  # fmt: skip
    config.save_pretrained(path)
    return path


def test_a_full_disk_leaves_nothing(model, tmp_path: Path) -> None:
    """A file size limit stands in for the disk: the write of the weights fails midway."""
    script = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000));"
        "from planc.cli import main; main(sys.argv[1:])"
    )
    args = ["build", "--model", str(model("llama")), "-o", str(tmp_path / "plan"), *SMALL]
    done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing(model, tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "planc", "build", "--model", str(model("llama")), "-o", str(tmp_path / "plan")]
    env = os.environ | {"PLANC_CACHE_DIR": str(tmp_path / "cache")}
    process = subprocess.Popen(
        [*command, *SMALL],
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(".plan.*.building/kernels")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err.strip().splitlines()[-1] == "planc: interrupted"
    assert {p.name for p in tmp_path.iterdir()} <= {"cache"}
