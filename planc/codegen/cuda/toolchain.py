"""What compiles Triton kernels: in go the installed wheels, out come their versions and a process that compiles.

ptxas is that of CUDA 13.0, the first release whose drivers (580) load what it makes. Triton brings two of its own, one
of them newer than many drivers, so both of its variables name the wheel's.
"""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from planc.errors import PlancError

PTXAS_RELEASE = "13.0"  # of the CUDA toolkit
_EXTRA = "pip install 'planc[build-cuda]'"
_ROOT = Path(__file__).parents[3]  # what holds the package
_TRITON, _PTXAS = "triton", "nvidia-cuda-nvcc"  # the wheels


@dataclass(frozen=True)
class Toolchain:
    """Versions of Triton and of ptxas, and where ptxas and the disassembler lie."""

    triton: str
    ptxas: str
    ptxas_path: Path
    disassembler: Path

    @property
    def versions(self) -> tuple[str, str]:
        """What decides a kernel's bytes besides its source."""
        return f"triton {self.triton}", f"ptxas {self.ptxas}"


@lru_cache(maxsize=1)
def toolchain() -> Toolchain:
    """The compilers that are installed. PlancError names the wheel that is missing or of another release."""
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        raise PlancError(f"CUDA kernels are compiled with {_TRITON}, which is not installed; install it with: {_EXTRA}")
    found = _ptxas()
    if found is None:
        raise PlancError(f"ptxas of the wheel {_PTXAS} is missing; install it with: {_EXTRA}")
    version = importlib.metadata.version(_PTXAS)
    if not version.startswith(f"{PTXAS_RELEASE}."):
        raise PlancError(
            f"{_PTXAS} is {version}, expected {PTXAS_RELEASE}: what another release makes may not load on drivers that "
            f"planc supports; install it with: {_EXTRA}"
        )
    tools = Path(triton.origin).parent / "backends/nvidia/bin"
    return Toolchain(importlib.metadata.version(_TRITON), version, found, tools / "nvdisasm")


def _ptxas() -> Path | None:
    try:
        spec = importlib.util.find_spec("nvidia.cu13")
    except ModuleNotFoundError:
        return None
    folders = (spec.submodule_search_locations if spec else None) or ()
    return next((p for f in folders if os.access(p := Path(f) / "bin/ptxas", os.X_OK)), None)


class Worker:
    """A process of `planc.codegen.cuda.worker`. It is used by one thread at a time."""

    def __init__(self, tools: Toolchain) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="planc-triton-")
        self._log = Path(self._folder.name) / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "planc.codegen.cuda.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(tools, Path(self._folder.name)),
                text=True,
            )

    def compile(self, job: dict[str, Any]) -> dict[str, Any]:
        """The answer to a job of `worker.main`. PlancError says why it failed, a crash of the compiler included."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: there is no answer either
        line = self._process.stdout.readline()
        if not line:
            raise PlancError(f"its compiler ended with status {self._process.wait()}: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PlancError(str(answer["error"]))
        return answer

    def close(self) -> None:
        """Ends the process, in the middle of a kernel if need be, and removes what it left."""
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()

    def _last_words(self) -> str:
        lines = [" ".join(line.split()) for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-3:])[:500]


def _environment(tools: Toolchain, folder: Path) -> dict[str, str]:
    """This process's environment without what would change a kernel's bytes."""
    changing = ("TRITON_", "LLVM_", "MLIR_", "NVPTX_", "PTXAS_", "DISABLE_PTXAS", "USE_IR_LOC")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(changing)}
    packages = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
    return kept | {
        "PYTHONPATH": os.pathsep.join(filter(None, packages)),
        "PYTHONSAFEPATH": "1",  # nothing is imported from the folder that planc is called in
        "TRITON_PTXAS_PATH": str(tools.ptxas_path),
        "TRITON_PTXAS_BLACKWELL_PATH": str(tools.ptxas_path),
        "TRITON_DEFAULT_FP_FUSION": "1",
        "TRITON_F32_DEFAULT": "ieee",  # no product of floats becomes tf32 because somebody forgot to say so
        "TRITON_DISABLE_LINE_INFO": "1",  # with it, the path of the source is part of the bytes
        "TRITON_CACHE_DIR": str(folder),
    }
