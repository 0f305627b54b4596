"""planc tune on an emulated GPU, and builds with what it measured; none of it needs a driver but the measuring."""

import hashlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from planc.cli import main
from planc.codegen.cuda.estimate import estimates
from planc.codegen.cuda.tiles import tiles_of
from planc.compiler.build import BuildRequest, build
from planc.compiler.ir import text
from planc.compiler.progress import Progress
from planc.compiler.tune import tune
from planc.compiler.tune_measure import race
from planc.compiler.tune_request import TuneRequest
from planc.emulator import driver
from planc.emulator.device import State
from planc.emulator.run import device_of
from planc.errors import PlancError, UsageError
from planc.plans import store, tuning
from planc.plans.diff import diff
from planc.plans.host import cache_dir
from planc.plans.schema import Plan
from planc.plans.tuning import Tile

MAX = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64, "reference": "none", "weights": "none"}


class Compiled(dict):
    """PTX by the sha256 of its cubin, of kernels that were compiled meanwhile too."""

    def get(self, key: str, default: object = None) -> object:
        if key not in self:
            for image in (cache_dir() / "kernels").glob("linear*-sm90-*.cubin"):
                self[hashlib.sha256(image.read_bytes()).hexdigest()] = image.with_suffix(".ptx").read_text()
        return super().get(key, default)


def tuned(plan: Path, out: Path, seconds: float) -> tuple[tuning.Entry, ...]:
    state = State(device_of(90), Compiled(), 0)
    with driver.active(state), Progress(quiet=True) as progress:
        made = tune(TuneRequest(plan, out, seconds, best=1), progress)
    assert state.memory.used == 0
    return made


def built(model: Path, out: Path, target: str = "sm_90a", **more: object) -> Plan:
    with Progress(quiet=True) as progress:
        return build(BuildRequest(str(model), out, target=target, **MAX, **more), progress)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plan(model, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("tune") / "plan"
    built(model("llama"), out)
    return out


def test_a_plan_says_how_its_products_are_cut_and_estimates_agree(plan: Path) -> None:
    made = store.load(plan)
    assert {row.tokens for row in made.tiles} == {1, 2, 4, 64}
    assert not any(row.measured for row in made.tiles)
    shown = CliRunner().invoke(main, ["inspect", str(plan)]).output
    assert "  linear [128, 64]  bf16 by rows of bf16\n    1 " in shown
    assert f"{made.tiles[0].tile}: 2.0 us, bound by launches\n" in shown
    graph = text.read(plan / store.GRAPH)
    decode = estimates(graph, tiles_of(made), 4, 64, 64)[0]
    told = sum(k.milliseconds for k in decode.kernels if k.op == "linear")
    assert told * 1e3 == pytest.approx(sum(row.launches * row.microseconds for row in made.tiles if row.tokens == 1))


def _of_a_clock(monkeypatch, run: Callable[[], tuple[tuning.Entry, ...]]) -> tuple[tuning.Entry, ...]:
    """What it measures when each race takes a second, however fast the machine is."""
    raced = []

    def counted(*args: object) -> list[float]:
        raced.append(args)
        return race(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr("planc.compiler.tune.race", counted)
        patch.setattr("planc.compiler.tune.time", SimpleNamespace(monotonic=lambda: float(len(raced))))
        return run()


def test_what_is_measured_builds_the_next_plan(plan: Path, model, tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "tuning.json"
    alone = [sys.executable, "-m", "planc", "tune", str(plan), "-o", str(file)]  # this process has the stand-in driver
    without = subprocess.run(alone, capture_output=True, text=True, check=False)
    assert without.returncode == 1
    assert "runs kernels on the GPU that a plan is for, here cuda:sm_90a: no NVIDIA driver" in without.stderr
    assert not file.exists()
    first = _of_a_clock(monkeypatch, lambda: tuned(plan, file, 5))
    products = {row.product: row for row in store.load(plan).tiles}
    assert 1 <= len(first) < len(products), "the seconds are over before all are measured"
    assert tuning.load(file).entries == first
    assert all(e.target == "sm_90a" and e.microseconds > 0 and e.gpu == "an emulated sm_90" for e in first)
    raced = []

    def interrupted(*args: object) -> list[float]:
        raced.append(args)
        if len(raced) > 1:
            raise KeyboardInterrupt
        return race(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("planc.compiler.tune.race", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tuned(plan, file, 60)
    *before, new = tuning.load(file).entries
    assert tuple(before) == first
    assert new.product not in {e.product for e in first}, "another run goes on, and keeps what it has measured"

    other = replace(first[0], tile=replace(first[0].tile, bn=128, warps=8))
    tuning.save(file, [other, *first[1:], replace(first[0], target="l4", tile=Tile(1, 1, 1, 1, 1))])
    made = built(model("llama"), tmp_path / "next", tuning=file)
    assert made.tuning == tuning.load(file).sha256
    rows = {row.product: row for row in made.tiles}
    assert {p for p, row in rows.items() if row.measured} == {e.product for e in first}
    assert rows[other.product].tile == other.tile
    assert str(tmp_path) not in (tmp_path / "next" / store.MANIFEST).read_text()
    assert "measured by planc tune" in CliRunner().invoke(main, ["inspect", str(tmp_path / "next")]).output


def test_a_tuning_file_that_cannot_be_used_is_named_before_any_work(plan: Path, model, tmp_path: Path) -> None:
    product = store.load(plan).tiles[0].product
    file, out = tmp_path / "tuning.json", tmp_path / "out"
    tuning.save(file, [tuning.Entry("sm_90a", product, Tile(64, 64, 32, 4, 3), 1.0)])
    with pytest.raises(UsageError, match=r"entry for linear of 1 row .* on sm_90a .*: BK is 64 for this weight, not"):
        built(model("llama"), out, tuning=file)
    with pytest.raises(UsageError, match="is for sm_90a, the build for cuda:l4; leave it out, or measure"):
        built(model("llama"), out, "l4", tuning=file)
    with pytest.raises(UsageError, match="is for sm_90a, the build for cpu:portable"):
        built(model("llama"), out, "cpu:portable", tuning=file)
    assert not out.exists()


def test_a_plan_for_another_target_or_gpu_is_refused(plan: Path, tmp_path: Path) -> None:
    other = tmp_path / "plan"
    other.mkdir()
    made = store.load(plan)
    store.seal(other, replace(made, target="cpu:portable"))
    with pytest.raises(UsageError, match="--best is not for a plan for cpu:portable"):
        tuned(other, tmp_path / "t.json", 1)
    for name in ("graph.ir", "kernels/launches.json"):
        (other / name).parent.mkdir(exist_ok=True)
        (other / name).write_bytes((plan / name).read_bytes())
    store.seal(other, replace(made, target="cuda:h200"))
    with pytest.raises(PlancError, match="for h200 with 132 SMs, this GPU is an emulated sm_90 with 1"):
        tuned(other, tmp_path / "t.json", 1)
    assert CliRunner().invoke(main, ["tune", str(plan), "--seconds", "0"]).exit_code == 2
    threads = CliRunner().invoke(main, ["tune", str(plan), "--threads", "2"])
    assert (threads.exit_code, "--threads is not for a plan for cuda:sm_90a" in threads.output) == (2, True)


@pytest.mark.slow
def test_builds_with_one_file_are_equal_and_a_tile_that_spills_is_named(plan: Path, model, tmp_path: Path) -> None:
    product = store.load(plan).tiles[0].product
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        tuning.save(tmp_path / name / "t.json", [tuning.Entry("sm_90a", product, Tile(64, 32, 64, 4, 3), 1.0)])
        built(model("llama"), tmp_path / name / "plan", tuning=tmp_path / name / "t.json")
    assert diff(tmp_path / "a" / "plan", tmp_path / "b" / "plan") == []
    tuning.save(tmp_path / "t.json", [tuning.Entry("sm_90a", product, Tile(256, 256, 64, 4, 2), 1.0)])
    told = r"tuning file's entry for linear of 1 row .* in tiles of 256 x 256 x 64, 4 warps, 2 stages cannot be used"
    with pytest.raises(PlancError, match=told):
        built(model("llama"), tmp_path / "spills", tuning=tmp_path / "t.json")
