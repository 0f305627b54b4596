"""The command line answers at once: help imports nothing heavy, and serving imports no compiler."""

import subprocess
import sys

HEAVY = ("torch", "transformers", "triton", "onnx", "numpy", "starlette", "uvicorn", "tokenizers", "rich")


def loaded(code: str) -> set[str]:
    """Top-level modules loaded after running `code` in a fresh interpreter."""
    script = f"{code}\nimport sys\nprint('MODULES', *sorted({{m.partition('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("MODULES")[2].split())


def test_help_imports_nothing_heavy() -> None:
    code = "from click.testing import CliRunner\nfrom planc.cli import main\nCliRunner().invoke(main, ['--help'])"
    assert not loaded(code) & set(HEAVY)


def test_the_runtime_imports_no_compiler() -> None:
    code = "import planc.runtime.engine, planc.runtime.server, planc.runtime.cpu, planc.plans.check, planc.plans.diff"
    assert not loaded(code) & {"torch", "transformers", "triton", "onnx", "ml_dtypes", "safetensors"}
