"""The workflow for GitHub Actions: its own steps, run one after the other for one target of its matrix."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from planc.codegen.skus import skus
from planc.plans import store

WORKFLOW = Path(__file__).parents[2] / "examples/ci/plans.yml"


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    return yaml.safe_load(WORKFLOW.read_text())


def test_its_targets_and_model_are_known(workflow: dict[str, Any]) -> None:
    from planc.compiler.source.described import described

    assert workflow["env"]["MODEL"] in described()
    matrix = workflow["jobs"]["build"]["strategy"]["matrix"]["target"]
    assert set(matrix) <= set(skus())


def test_its_steps_build_and_check_a_plan(workflow: dict[str, Any], model, tmp_path: Path) -> None:
    """All steps but those that install planc or move files, on a tiny model in the place of the large one."""
    job = workflow["jobs"]["build"]
    target = job["strategy"]["matrix"]["target"][0]
    env = {**os.environ, **workflow["env"], "TARGET": target, "MODEL": str(model("llama")), "MAX_MODEL_LEN": "128"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    steps = [step for step in job["steps"] if "run" in step and step["name"] != "install"]
    assert [s["name"] for s in steps] == ["build", "what it is", "run its kernels"]
    for step in steps:
        done = subprocess.run(
            ["bash", "-e", "-c", step["run"]], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{step['name']}: {done.stdout}{done.stderr}"
    assert store.load(tmp_path / "plans" / target).target == f"cuda:{target}"
    cached = next(s for s in job["steps"] if s.get("uses", "").startswith("actions/cache"))["with"]["path"]
    assert any((tmp_path / cached).iterdir())
    uploaded = job["steps"][-1]["with"]["path"].replace("${{ matrix.target }}", target)
    assert (tmp_path / uploaded / "plan.json").is_file()
