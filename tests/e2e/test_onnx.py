"""`planc export`: onnxruntime's logits against the plan's own engine and transformers, and what lies where it may."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner

from planc.cli import main
from planc.codegen.target import host
from planc.compiler.onnx_export import writer
from planc.plans import store
from tests.e2e.rig import run
from tests.lifted import hugging_face, relative_error

# Plans that other tests build too. Dense; sliding windows and soft caps; learned positions; chunks and experts; experts
# over latent attention.
KINDS = (
    "llama",
    "deepseek_v3",
    *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("gemma2", "gpt2", "llama4_text")),
)
# Dense; alibi; experts.
NARROW = (
    ("llama", "int8"),
    ("mixtral", "bf16"),
    pytest.param("llama", "bf16", marks=pytest.mark.slow),
    pytest.param("bloom", "bf16", marks=pytest.mark.slow),
    pytest.param("mixtral", "int8", marks=pytest.mark.slow),
    pytest.param("llama", "int4-wo", marks=pytest.mark.slow),
)


def exported(plan: Path, out: Path, *flags: str) -> str:
    result = CliRunner().invoke(main, ["export", str(plan), "--onnx", str(out), *flags])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def refused(plan: Path, out: Path, *flags: str, code: int = 2) -> str:
    """The one line of a call that fails with `code`."""
    result = CliRunner().invoke(main, ["export", str(plan), "--onnx", str(out), *flags])
    assert result.exit_code == code, result.stdout
    (line,) = result.stderr.splitlines()
    return line


def prefill(path: Path, ids: np.ndarray) -> np.ndarray:
    """Logits [T, vocab] of one prompt."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feed = {"input_ids": ids[None], "position_ids": np.arange(len(ids))[None]}
    (logits,) = session.run(["logits"], {i.name: feed[i.name] for i in session.get_inputs()})
    assert logits.dtype == np.float32
    return logits[0]


@pytest.mark.parametrize("arch", KINDS)
def test_onnxruntime_equals_transformers_and_the_engine(plan, model, tmp_path: Path, arch: str) -> None:
    out = tmp_path / "model.onnx"
    exported(plan(arch), out)
    onnx.checker.check_model(out, full_check=True)
    ids = np.random.default_rng(7).integers(4, 300, 75)
    got = prefill(out, ids)
    assert relative_error(got, hugging_face(model(arch), ids)) < 1e-4
    (last,) = run(plan(arch), [ids.tolist()], max_tokens=1).logits[0]
    assert relative_error(got[-1], last) < 1e-5
    one = prefill(out, ids[:1])
    assert relative_error(one, got[:1]) < 1e-5


@pytest.mark.parametrize(("arch", "dtype"), NARROW)
def test_narrow_weights_and_cache_are_those_of_the_plan(plan, tmp_path: Path, arch: str, dtype: str) -> None:
    """bfloat16 rounds keys and values: where float32 falls on either side of a half, one step of it is seen. So it is
    of 8 bits, of which a step is 1/127: rows turn here by a product, and there by sums in another order.
    """
    out, level = tmp_path / "model.onnx", str(replace(host(), features=()))  # what does not round activations
    exported(plan(arch, dtype, level), out)
    onnx.checker.check_model(out, full_check=True)
    stored = {t.data_type for t in onnx.load(out).graph.initializer}
    wanted = {"bf16": onnx.TensorProto.BFLOAT16, "int8": onnx.TensorProto.INT8, "int4-wo": onnx.TensorProto.UINT8}
    assert wanted[dtype] in stored
    ids = np.random.default_rng(8).integers(4, 300, 75)
    (last,) = run(plan(arch, dtype, level), [ids.tolist()], max_tokens=1).logits[0]
    assert relative_error(prefill(out, ids)[-1], last) < (1e-2 if dtype == "int8" else 1e-3)


def test_exporting_twice_gives_the_same_bytes_and_tells_what_was_written(plan, tmp_path: Path) -> None:
    told = exported(plan("llama"), tmp_path / "a" / "x.onnx")
    exported(plan("llama"), tmp_path / "b.onnx")
    assert (tmp_path / "a" / "x.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    assert "llama-0 f32" in told
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["x.onnx"]
    model = onnx.load(tmp_path / "b.onnx")
    assert {p.key: p.value for p in model.metadata_props}["max_model_len"] == "256"
    assert {i.domain for i in model.opset_import} == {""}


def test_large_weights_lie_beside_the_model(plan, tmp_path: Path, monkeypatch) -> None:
    ids = np.random.default_rng(9).integers(4, 300, 20)
    exported(plan("llama"), tmp_path / "one.onnx")
    monkeypatch.setattr(writer, "INLINE_LIMIT", 0)
    assert "in two.onnx.data" in exported(plan("llama"), tmp_path / "two.onnx")
    onnx.checker.check_model(tmp_path / "two.onnx", full_check=True)
    assert (tmp_path / "two.onnx").stat().st_size < 100_000 < (tmp_path / "two.onnx.data").stat().st_size
    assert (prefill(tmp_path / "one.onnx", ids) == prefill(tmp_path / "two.onnx", ids)).all()
    assert "pass --force" in refused(plan("llama"), tmp_path / "two.onnx")
    monkeypatch.undo()
    exported(plan("llama"), tmp_path / "two.onnx", "--force")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.onnx", "two.onnx"]


def test_no_file_is_replaced_or_left_that_should_not_be(plan, tmp_path: Path, monkeypatch) -> None:
    path = plan("llama")
    assert "inside the plan" in refused(path, path / "model.onnx")
    assert "is no file" in refused(path, tmp_path)
    other = tmp_path / "thesis.txt"
    other.write_text("years of work")
    assert "exists; pass --force" in refused(path, other)
    assert "not an ONNX file" in refused(path, other, "--force")
    out = tmp_path / "x.onnx"
    exported(path, out)
    before = out.read_bytes()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "write_model", full)
    assert "no space left" in refused(path, out, "--force", code=1)
    assert out.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["thesis.txt", "x.onnx"]


def test_a_plan_that_is_not_whole_is_refused_with_the_next_step(plan, tmp_path: Path) -> None:
    assert "is no plan" in refused(tmp_path / "nowhere", tmp_path / "x.onnx", code=1)
    root = tmp_path / "plan"
    shutil.copytree(plan("llama"), root)
    (root / store.GRAPH).write_text("graph")
    assert "graph.ir has changed" in refused(root, tmp_path / "x.onnx", code=1)
    loaded = store.load(root)
    store.seal(root, replace(loaded, options=replace(loaded.options, weights="none")))
    assert "`planc pack`" in refused(root, tmp_path / "x.onnx", code=1)
    assert not (tmp_path / "x.onnx").exists()


def test_export_needs_onnx_alone(plan, tmp_path: Path) -> None:
    """No torch, no transformers; without onnx, the command that installs it."""
    call = f"CliRunner().invoke(main, ['export', {str(plan('llama'))!r}, '--onnx', {str(tmp_path / 'x.onnx')!r}])"
    code = f"""import sys
from click.testing import CliRunner
from planc.cli import main
sys.modules['onnx'] = None
print({call}.stderr)
del sys.modules['onnx']
assert {call}.exit_code == 0
assert not {{'torch', 'transformers'}} & set(sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "needs onnx; install it with: pip install 'planc[build]'" in done.stdout
