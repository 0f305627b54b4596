"""What compiles kernels: in go the installed wheels, out come their versions and a process that compiles.

ptxas and NVRTC are those of CUDA 13.0, the first release whose drivers (580) load what they make. Triton brings two
ptxas of its own, one of them newer than many drivers, so both of its variables name the wheel's.
"""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from planc.codegen.cuda.nvrtc import LIBRARY
from planc.errors import PlancError

RELEASE = "13.0"  # of the CUDA toolkit
_EXTRA = "pip install 'planc[build-cuda]'"
_ROOT = Path(__file__).parents[3]  # what holds the package
_TRITON, _PTXAS, _NVRTC = "triton", "nvidia-cuda-nvcc", "nvidia-cuda-nvrtc"  # the wheels


@dataclass(frozen=True)
class Toolchain:
    """Versions of the compilers and of ptxas, and where ptxas, the disassembler and the library NVRTC lie."""

    triton: str
    ptxas: str
    nvrtc: str
    ptxas_path: Path
    disassembler: Path
    nvrtc_path: Path

    def versions(self, suffix: str) -> tuple[str, str]:
        """What decides a kernel's bytes besides its source, `.py` or `.cu`."""
        return f"nvrtc {self.nvrtc}" if suffix == ".cu" else f"triton {self.triton}", f"ptxas {self.ptxas}"


@lru_cache(maxsize=1)
def toolchain() -> Toolchain:
    """The compilers that are installed. PlancError names the wheel that is missing or of another release."""
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        raise PlancError(f"CUDA kernels are compiled with {_TRITON}, which is not installed; install it with: {_EXTRA}")
    ptxas, ptxas_version = _of_wheel(_PTXAS, "bin/ptxas", os.X_OK)
    nvrtc, nvrtc_version = _of_wheel(_NVRTC, f"lib/{LIBRARY}", os.R_OK)
    tools = Path(triton.origin).parent / "backends/nvidia/bin"
    version = importlib.metadata.version(_TRITON)
    return Toolchain(version, ptxas_version, nvrtc_version, ptxas, tools / "nvdisasm", nvrtc)


def _of_wheel(wheel: str, name: str, mode: int) -> tuple[Path, str]:
    """A file of NVIDIA's wheel, and the wheel's version."""
    found = next((p for f in _folders() if os.access(p := Path(f) / name, mode)), None)
    if found is None:
        raise PlancError(f"{Path(name).name} of the wheel {wheel} is missing; install it with: {_EXTRA}")
    version = importlib.metadata.version(wheel)
    if not version.startswith(f"{RELEASE}."):
        raise PlancError(
            f"{wheel} is {version}, expected {RELEASE}: what another release makes may not load on drivers that "
            f"planc supports; install it with: {_EXTRA}"
        )
    return found, version


def _folders() -> Sequence[str]:
    """Where NVIDIA's wheels of CUDA 13 put their files."""
    try:
        spec = importlib.util.find_spec("nvidia.cu13")
    except ModuleNotFoundError:
        return ()
    return (spec.submodule_search_locations if spec else None) or ()


NVRTC_VARIABLE = "PLANC_NVRTC"  # by which a worker is told where NVRTC lies, as Triton is told where ptxas does


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
        NVRTC_VARIABLE: str(tools.nvrtc_path),
        "TRITON_PTXAS_PATH": str(tools.ptxas_path),
        "TRITON_PTXAS_BLACKWELL_PATH": str(tools.ptxas_path),
        "TRITON_DEFAULT_FP_FUSION": "1",
        "TRITON_F32_DEFAULT": "ieee",  # no product of floats becomes tf32 because somebody forgot to say so
        "TRITON_DISABLE_LINE_INFO": "1",  # with it, the path of the source is part of the bytes
        "TRITON_CACHE_DIR": str(folder),
    }
