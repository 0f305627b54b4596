"""A plain `pip install planc` in a new venv: what the compiler needs is not there, and a plan runs all the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from planc.compiler.build import BuildRequest, build
from planc.compiler.progress import Progress
from tests.models import tiny

ROOT = Path(__file__).parents[2]
ABSENT = ("torch", "transformers", "ml_dtypes", "safetensors", "gguf", "rich")


def environment() -> dict[str, str]:
    """This one, without what would let the new venv see the repository or this venv."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def sources(folder: Path) -> Path:
    """A copy of what an install reads, for pip would leave build/ and *.egg-info in the repository."""
    shutil.copytree(ROOT / "planc", folder / "planc", ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, folder)
    return folder


def build_plan(folder: Path) -> Path:
    limits = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    model = tiny("llama", folder, num_hidden_layers=1)
    request = BuildRequest(str(model), folder / "plan", dtype="f32", reference="none", **limits)
    with Progress(quiet=True) as progress:
        build(request, progress)
    return request.out


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> tuple[Path, Path]:
    """The new venv's bin and a plan, which is built while pip works. It is this venv's pip: that saves seconds."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home)
    package = sources(tmp_path_factory.mktemp("sources"))
    python = home / "bin/python"
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile", package]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as pip:
        plan = build_plan(tmp_path_factory.mktemp("built"))
        _, errors = pip.communicate()
    assert pip.returncode == 0, errors
    return home / "bin", plan


@pytest.fixture
def run(installed, tmp_path):
    """Runs a program of the new venv, away from the repository; returns what it printed."""

    def program(name: str, *arguments: object) -> str:
        command = [installed[0] / name, *map(str, arguments)]
        done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    return program


def test_what_only_a_build_needs_is_not_installed(run) -> None:
    code = f"from importlib.util import find_spec; print([m for m in {ABSENT} if find_spec(m)])"
    assert run("python", "-c", code).strip() == "[]"


def test_help_check_and_run_work(run, installed) -> None:
    plan = installed[1]
    assert "Compile a Hugging Face language model" in run("planc", "--help")
    assert "FAIL" not in run("planc", "check", plan)
    assert run("planc", "run", plan, "--prompt", "hello", "--max-tokens", 2).strip()
    assert "FAIL" not in run("planc", "verify", plan)


def test_a_build_says_what_is_missing(installed, tmp_path) -> None:
    command = [installed[0] / "planc", "build", "--model", "nowhere"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "pip install 'planc[build]'" in done.stderr
    assert "Traceback" not in done.stderr
