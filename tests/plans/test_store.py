"""Plan directories: written whole or not at all, read back equal, refused by name when they do not fit."""

import errno
import hashlib
import json
import os
from pathlib import Path

import pytest

from planc.errors import PlancError, UsageError
from planc.plans import schema
from planc.plans.check import check
from planc.plans.codec import dumps, to_json
from planc.plans.diff import diff
from planc.plans.store import check_free, listing, load, publish, seal
from planc.plans.tensors import Writer, read_header


def make(**changes: object) -> schema.Plan:
    fields = {
        "model": schema.ModelInfo("tiny", "LlamaForCausalLM", "llama", "ab" * 32, 1234, 2, None, (2,)),
        "target": "cpu:portable",
        "options": schema.Options("f32", "f32", 16, "pack", 0),
        "limits": schema.Limits(128, 4, 64, 300),
        "kv": schema.KVLayout("f32", 16, 4096, (schema.KVLayer(2, 8, 8, 0, 0, 2048),)),
        "memory": schema.Memory(1000, 64, 4096, 256, 131072),
        "program": schema.Program("kernels/model.so", 4096, 0, ("w",)),
        "kernels": (schema.Kernel("linear_f32_n8_k8", "linear", "linear_f32_n8_k8.cpp", 2),),
        "weight_files": ("weights/rank0.safetensors",),
        "goldens": (schema.Golden("Hi", (1, 2), (3, 4), (0.5, 1.25), (True, False)),),
        "goldens_target": "cpu:portable",
        "accuracy": schema.Accuracy("transformers f32", "00", 10, 1e-9, 1.0, 3.5, 3.5),
        "passes": (schema.PassLog("fold", 3, None, 7), schema.PassLog("norm", 2, 2, 7)),
        "made_with": {"planc": "0.1.0"},
    }
    return schema.Plan(**(fields | changes))


def written(out: Path, **changes: object) -> Path:
    import numpy as np

    with publish(out, force=False) as root:
        (root / "weights").mkdir()
        w = np.arange(5, dtype=np.float32)
        with Writer(root / "weights/rank0.safetensors", [("w", "f32", (5,), 20)]) as file:
            file.write("w", w)
        (root / "graph.ir").write_text("graph\n")
        seal(root, make(**changes))
    return out


def test_a_plan_reads_back_equal(tmp_path: Path) -> None:
    out = written(tmp_path / "plan")
    plan = load(out)
    assert plan.goldens == make().goldens
    assert plan.files == listing(out)
    assert to_json(plan) == (out / "plan.json").read_text()
    assert [f for f in check(out) if not f.ok] == []
    assert [p.name for p in tmp_path.iterdir()] == ["plan"]


def test_a_build_that_dies_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), publish(tmp_path / "plan", force=False) as root:
        (root / "half").write_text("written")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(PlancError, match="no space left"), publish(tmp_path / "plan", force=False):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_plan_stays_without_force_and_goes_with_it(tmp_path: Path) -> None:
    out = written(tmp_path / "plan")
    with pytest.raises(UsageError, match="--force"), publish(out, force=False):
        pass
    with publish(out, force=True) as root:
        seal(root, make(target="cpu:x86-64-v3"))
    assert load(out).target == "cpu:x86-64-v3"
    assert [p.name for p in tmp_path.iterdir()] == ["plan"]


def test_force_deletes_plans_only(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "letter.txt").write_text("dear")
    with pytest.raises(UsageError, match="not a plan"):
        check_free(home, force=True)
    assert (home / "letter.txt").read_text() == "dear"


def test_a_plan_from_before_a_field_was_added_still_loads(tmp_path: Path) -> None:
    out = written(tmp_path / "plan")
    data = json.loads((out / "plan.json").read_text())
    del data["accuracy"]["weights"], data["kv"]["layers"][0]["mask"]
    data["digest"] = ""
    data["digest"] = hashlib.sha256(dumps(data).encode()).hexdigest()
    (out / "plan.json").write_text(dumps(data))
    assert load(out).accuracy == make().accuracy
    (out / "plan.json").write_text(dumps(data | {"goldens_target": "cpu:x86-64-v3"}))
    with pytest.raises(PlancError, match="has changed"):
        load(out)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.update(schema_version=99), "schema version 99"),
        (lambda d: d.pop("limits"), "plan.limits is missing"),
        (lambda d: d["limits"].update(max_num_seqs="many"), "plan.limits.max_num_seqs should be a value of type int"),
        (lambda d: d["kv"]["layers"][0].update(colour=1), r"plan.kv.layers\[0\].colour is not a field"),
        (lambda d: d.update(goldens={}), "plan.goldens should be a list"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused_by_field(tmp_path: Path, edit, message: str) -> None:
    out = written(tmp_path / "plan")
    data = json.loads((out / "plan.json").read_text())
    edit(data)
    (out / "plan.json").write_text(json.dumps(data))
    with pytest.raises(PlancError, match=message):
        load(out)
    assert not check(out)[0].ok


@pytest.mark.parametrize("field", ["arena_bytes", "logits_offset"])
def test_a_changed_number_of_the_manifest_is_refused(tmp_path: Path, field: str) -> None:
    out = written(tmp_path / "plan")
    data = json.loads((out / "plan.json").read_text())
    data["program"][field] += 64
    (out / "plan.json").write_text(json.dumps(data))
    with pytest.raises(PlancError, match="has changed since the build"):
        load(out)


def test_a_failed_swap_leaves_the_old_plan(tmp_path: Path, monkeypatch) -> None:
    out = written(tmp_path / "plan")
    rename = os.rename

    def failing(a: Path, b: Path) -> None:
        if str(a).endswith(".building"):
            raise OSError(errno.EACCES, "Permission denied")
        rename(a, b)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(PlancError, match="Permission denied"), publish(out, force=True) as root:
        seal(root, make(target="cpu:x86-64-v3"))
    assert load(out).target == "cpu:portable"
    assert [p.name for p in tmp_path.iterdir()] == ["plan"]


def test_a_plan_may_take_the_place_of_an_empty_folder(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with publish(Path("."), force=True) as root:
        seal(root, make())
    assert load(tmp_path / "here").target == "cpu:portable"


def test_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlancError, match="is no plan"):
        load(tmp_path)
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(PlancError, match="not valid JSON"):
        load(tmp_path)


def test_check_names_a_flipped_byte_a_missing_and_an_extra_file(tmp_path: Path) -> None:
    out = written(tmp_path / "plan")
    path = out / "weights/rank0.safetensors"
    data = bytearray(path.read_bytes())
    data[-60] ^= 1
    path.write_bytes(data)
    (out / "graph.ir").unlink()
    (out / "note").write_text("?")
    bad = [f.detail for f in check(out) if not f.ok]
    assert any("rank0.safetensors has changed" in d for d in bad)
    assert any("graph.ir is missing" in d for d in bad)
    assert any("note is not in the manifest" in d for d in bad)


def test_check_refuses_an_isa_that_no_cpu_has(tmp_path: Path) -> None:
    out = written(tmp_path / "plan", target="cpu:x86-64-v9")
    (finding,) = [f for f in check(out) if f.name == "target"]
    assert not finding.ok
    assert "x86-64-v9" in finding.detail


def test_diff_says_identical_or_what_differs(tmp_path: Path) -> None:
    a, b = written(tmp_path / "a"), written(tmp_path / "b")
    assert diff(a, b) == []
    c = written(tmp_path / "c", limits=schema.Limits(256, 4, 64, 300))
    assert diff(a, c) == ["limits.max_model_len: 128 -> 256"]
    (b / "weights/rank0.safetensors").write_bytes(b"x")
    assert "differs: weights/rank0.safetensors" in diff(a, b)


def test_tensors_are_aligned_and_any_reader_opens_them(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import load_file

    arrays = {"a": np.arange(3, dtype=np.float32), "b": np.arange(70, dtype=np.int8), "c": np.zeros((0,), np.float32)}
    path = tmp_path / "t.safetensors"
    names = {"a": "f32", "b": "i8", "c": "f32"}
    with Writer(path, [(k, names[k], v.shape, v.nbytes) for k, v in arrays.items()]) as out:
        for k, v in arrays.items():
            out.write(k, v)
    entries = read_header(path)
    assert list(entries) == ["a", "b", "c"]
    assert all(e.offset % 64 == 0 for e in entries.values())
    again = load_file(path)
    assert all((again[k] == v).all() for k, v in arrays.items())
    path.write_bytes(path.read_bytes()[:-70])
    with pytest.raises(PlancError, match="cut short"):
        read_header(path)


def test_codes_of_8_and_of_4_bits_are_stored(tmp_path: Path) -> None:
    """Two codes of 4 bits share a byte, and are bytes to every reader."""
    import ml_dtypes
    import numpy as np
    from safetensors.torch import load_file

    arrays = {
        "f8e4m3": np.arange(8, dtype=np.float32).astype(ml_dtypes.float8_e4m3fn),
        "u4": np.arange(6, dtype=np.uint8),
    }
    with Writer(tmp_path / "t.safetensors", [(n, n, a.shape, a.nbytes) for n, a in arrays.items()]) as out:
        for name, array in arrays.items():
            out.write(name, array)
    assert {e.name: e.dtype for e in read_header(tmp_path / "t.safetensors").values()} == {
        "f8e4m3": "f8e4m3",
        "u4": "u8",
    }
    again = load_file(tmp_path / "t.safetensors")
    assert again["f8e4m3"].float().tolist() == list(range(8))
    assert again["u4"].tolist() == list(range(6))


def test_the_writer_insists_on_what_it_announced(tmp_path: Path) -> None:
    import numpy as np

    with pytest.raises(ValueError, match="never written"), Writer(tmp_path / "t", [("a", "f32", (2,), 8)]):
        pass
    with Writer(tmp_path / "t", [("a", "f32", (2,), 8)]) as out:
        with pytest.raises(ValueError, match="the header has a of 8"):
            out.write("b", np.zeros(2, np.float32))
        out.write("a", np.zeros(2, np.float32))
