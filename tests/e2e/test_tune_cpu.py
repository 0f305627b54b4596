"""planc tune on this CPU, and builds with what it measured: the same plan each time, and the tokens of one without."""

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from planc.cli import main
from planc.codegen.cpu import build_library
from planc.codegen.render import render
from planc.codegen.target import host
from planc.compiler.build import BuildRequest, build
from planc.compiler.ir import text
from planc.compiler.progress import Progress
from planc.compiler.tune import tune
from planc.compiler.tune_cpu_measure import Subject, race
from planc.compiler.tune_request import TuneRequest
from planc.errors import UsageError
from planc.plans import store, tuning
from planc.plans.diff import diff
from planc.plans.schema import Plan
from planc.plans.tuning import Blocking, CpuEntry, CpuProduct, Entry, Product, Tile
from tests.e2e.rig import run

GPU_ENTRY = Entry("l4", Product("linear", "bf16", "bf16", 64, 96, 1), Tile(16, 32, 64, 4, 2), 7.0)
_KERNEL = """#include "planc/abi.h"
PLANC_KERNEL({name}) {{
    if (thread == 0) planc::out<float>(buffers, 2)[0] = {value};
    (void)sizes, (void)rows, (void)threads;
}}
"""


def built(model: Path, out: Path, file: Path | None = None) -> Plan:
    limits = {"max_model_len": 64, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    with Progress(quiet=True) as progress:
        return build(BuildRequest(str(model), out, reference="none", tuning=file, **limits), progress)  # type: ignore[arg-type]


def measured(plan: Path, out: Path, seconds: float = 600) -> tuple[CpuEntry, ...]:
    with Progress(quiet=True) as progress:
        made = tune(TuneRequest(plan, out, seconds, threads=1), progress)
    return tuple(e for e in made if isinstance(e, CpuEntry))


@pytest.fixture(scope="module")
def plan(model, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("tune") / "plan"
    built(model("llama"), out)
    return out


@pytest.fixture(scope="module")
def product(plan: Path) -> CpuProduct:
    weight = next(t for t in text.read(plan / store.GRAPH).types.values() if t.layout.startswith("n64"))
    return CpuProduct("linear", weight.dtype, int(weight.shape[0]), int(weight.shape[1]))


def test_what_is_measured_is_kept_and_an_interrupt_leaves_a_whole_file(plan: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("planc.compiler.tune_cpu.variants", lambda p: (Blocking(), Blocking(tile_rows=2)))
    file, raced = tmp_path / "tuning.json", []
    tuning.save(file, [GPU_ENTRY])

    def interrupted(*args: object) -> list[float | None] | None:
        raced.append(args)
        if len(raced) > 2:
            raise KeyboardInterrupt
        return race(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr("planc.compiler.tune_cpu.race", interrupted)
        with pytest.raises(KeyboardInterrupt):
            measured(plan, file)
    first = tuning.load(file).cpu_entries
    assert 1 <= len(first) <= 2
    assert [p.name for p in tmp_path.iterdir()] == ["tuning.json"]
    made = measured(plan, file)
    found = tuning.load(file)
    assert found.entries == (GPU_ENTRY,)
    assert {e.product for e in found.cpu_entries} == {e.product for e in made}
    assert all(e.target == str(host()) and 0 < e.ratio <= 1 and e.threads == 1 for e in made)
    assert all(e.ratio == 1 or e.blocking.given for e in made)


def test_seconds_end_before_a_product_that_is_not_clear(plan: Path, tmp_path: Path) -> None:
    assert measured(plan, tmp_path / "tuning.json", 0.001) == ()
    assert not (tmp_path / "tuning.json").exists()


def test_builds_with_a_file_are_equal_and_have_the_tokens_of_one_without(
    plan: Path, product: CpuProduct, model, tmp_path: Path
) -> None:
    file = tmp_path / "tuning.json"
    entry = CpuEntry(str(host()), product, Blocking(48, 4, 128, 2), 0.9)
    tuning.save(file, [], [entry, replace(entry, product=replace(product, n=1))])
    made = [built(model("llama"), tmp_path / name, file) for name in "ab"]
    assert diff(tmp_path / "a", tmp_path / "b") == []
    assert made[0].tuning == tuning.load(file).sha256
    assert [b.product for b in made[0].blockings] == [product]
    assert made[0].blockings[0].launches == sum(k.count for k in made[0].kernels if "tilerows2" in k.name) > 0
    before = {k.name for k in store.load(plan).kernels}
    assert {k.name for k in made[0].kernels if "tilerows2" not in k.name} < before
    shown = CliRunner().invoke(main, ["inspect", str(tmp_path / "a")]).output
    assert "chunk_rows 48, panel_from 4, panel_k 128, tile_rows 2; measured by planc tune" in shown
    prompts = [[3, 1, 4, 1, 5], list(range(1, 40)), [9]]
    one, two = (run(p, prompts, seqs=16, tokens=64, max_tokens=8) for p in (plan, tmp_path / "a"))
    assert one.tokens == two.tokens
    assert all((a == b).all() for a, b in zip(one.logits, two.logits, strict=True))


def test_an_entry_that_cannot_be_used_and_flags_of_gpus_are_refused(
    plan: Path, product: CpuProduct, model, tmp_path: Path
) -> None:
    file = tmp_path / "tuning.json"
    tuning.save(file, [], [CpuEntry(str(host()), product, Blocking(tile_rows=9), 0.9)])
    with pytest.raises(
        UsageError, match=r"entry for linear by .* with tile_rows 9: tile_rows must be from 1 to 6, not 9"
    ):
        built(model("llama"), tmp_path / "out", file)
    tuning.save(file, [], [CpuEntry("cpu:x86-64-v4+amx", product, Blocking(), 0.9)])
    with pytest.raises(UsageError, match=r"is for cpu:x86-64-v4\+amx, the build for cpu:"):
        built(model("llama"), tmp_path / "out", file)
    for flag in ("--device", "--best"):
        refused = CliRunner().invoke(main, ["tune", str(plan), flag, "1"])
        assert refused.exit_code == 2
        assert f"{flag} is not for a plan for {host()}; leave it out" in refused.output


def test_a_plan_for_another_isa_is_refused(plan: Path, tmp_path: Path, monkeypatch) -> None:
    other = tmp_path / "plan"
    other.mkdir()
    store.seal(other, replace(store.load(plan), target="cpu:x86-64-v4+amx"))
    monkeypatch.setattr("planc.plans.host.cpu_flags", frozenset)
    refused = CliRunner().invoke(main, ["tune", str(other), "-o", str(tmp_path / "t.json")])
    assert refused.exit_code == 1
    assert "is for cpu:x86-64-v4+amx, and this CPU lacks " in refused.output


def test_a_kernel_with_other_bits_is_found(plan: Path, tmp_path: Path) -> None:
    graph = text.read(plan / store.GRAPH)
    node = next(n for n in graph.nodes if n.op == "linear")
    subject = Subject(node, [graph.types[i] for i in node.inputs], (1, 2), 1)
    values = {"one": "1.0f", "same": "1.0f", "other": "2.0f"}
    sources = {f"{name}.cpp": _KERNEL.format(name=name, value=value) for name, value in values.items()}
    sources["race.cpp"] = render("race.cpp.jinja", {"kernels": list(values), "num_buffers": 3})
    library = ctypes.CDLL(str(build_library(sources, host(), tmp_path)))
    found = race(library, subject, 3, float("inf"))
    assert found is not None
    assert found[0] == 1.0
    assert found[1] is not None
    assert found[2] is None
    assert race(library, subject, 3, 0.0) is None
