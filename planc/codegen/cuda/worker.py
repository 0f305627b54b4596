"""A process that compiles kernels: in go jobs on standard input, out come files, and a line of JSON for each.

It is a process of its own so that a crash of the compiler takes one kernel and not the build, so that the environment
which Triton reads is exactly the one that `aot` gives, and so that kernels compile on all CPUs at once.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from planc.codegen.cuda import nvrtc
from planc.codegen.cuda.toolchain import NVRTC_VARIABLE


def main() -> None:
    """Serves until standard input ends. A job: source, function, signature, constants, aligned, num_warps, num_stages,
    arch, and the path `out` to which .cubin and .ptx are appended. An answer: entry, shared and scratch, or error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Triton prints is no answer
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
        answers.flush()


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    try:
        return _compile(job)
    except Exception as e:  # noqa: BLE001 - whatever the compiler raises is the answer
        return {"error": _told(e)}


def _told(error: BaseException) -> str:
    """One line of the first cause: an error in a function that a kernel calls is the cause of one in the kernel."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(f"{type(error).__name__}: {error}".split())[:1000]


def _compile(job: dict[str, Any]) -> dict[str, Any]:
    return (_cuda if job["source"].endswith(".cu") else _triton)(job)


def _cuda(job: dict[str, Any]) -> dict[str, Any]:
    """A kernel of CUDA C++, whose blocks take no dynamic shared memory."""
    arch = f"{job['arch']}{'a' if job['arch'] >= 90 else ''}"
    library, ptxas = Path(os.environ[NVRTC_VARIABLE]), Path(os.environ["TRITON_PTXAS_PATH"])
    nvrtc.compile(Path(job["source"]), job["function"], job["constants"], arch, library, ptxas, job["out"])
    return {"entry": job["function"], "shared": 0, "scratch": 0}


def _triton(job: dict[str, Any]) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(_module(Path(job["source"])), job["function"])
    names = function.arg_names
    types = dict.fromkeys(job["constants"], "constexpr") | job["signature"]
    source = ASTSource(
        fn=function,
        signature={n: types[n] for n in names},
        constexprs={n: _tuples(v) for n, v in job["constants"].items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in job["aligned"]},
    )
    options = {"num_warps": job["num_warps"], "num_stages": job["num_stages"]}
    made = triton.compile(source, target=GPUTarget("cuda", job["arch"], 32), options=options)
    Path(job["out"] + ".cubin").write_bytes(made.asm["cubin"])
    Path(job["out"] + ".ptx").write_text(made.asm["ptx"])
    meta = made.metadata
    return {"entry": meta.name, "shared": meta.shared, "scratch": meta.global_scratch_size + meta.profile_scratch_size}


def _tuples(value: Any) -> Any:
    """JSON has lists where constants are tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _module(path: Path) -> ModuleType:
    """The kernels of a source file; loaded once a process."""
    name = f"planc_kernels_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


if __name__ == "__main__":
    main()
