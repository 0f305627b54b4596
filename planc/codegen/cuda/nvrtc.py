"""CUDA C++ to PTX and a cubin without a GPU: in go a source's path and macros, out come both texts, by NVRTC and ptxas.

It is called in the process of a worker, as Triton is: the library is NVIDIA's, and a crash takes one kernel with it.
"""

import ctypes
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

LIBRARY, BUILTINS = "libnvrtc.so.13", "libnvrtc-builtins.so.13.0"


def compile(
    source: Path, function: str, macros: Mapping[str, object], arch: str, library: Path, ptxas: Path, out: str
) -> None:
    """Writes `<out>.ptx` and `<out>.cubin` of the kernel that a source makes of `KERNEL`; `arch` is "90a" for sm_90a.

    Macros hold numbers; THREADS is the size of a block, which the launch must keep to. ValueError with what the
    compiler says.
    """
    macros = {"KERNEL": function, **macros}
    options = [f"--gpu-architecture=compute_{arch}", "--std=c++17", "--fmad=false"]
    options += [f"-D{name}={value}" for name, value in macros.items()]
    ptx = _Nvrtc(library).ptx(source.read_bytes(), source.name, options)
    # What launches promise is that blocks have so many threads, not at most so many: the driver is to refuse others.
    ptx = re.sub(r"\.maxntid\s+(\d+)", r".reqntid \1", re.sub(r"^//[^\n]*\n", "", ptx, flags=re.MULTILINE))
    Path(f"{out}.ptx").write_text(ptx)
    command = [str(ptxas), f"-arch=sm_{arch}", f"{out}.ptx", "-o", f"{out}.cubin"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"ptxas: {done.stderr.strip()}")


class _Nvrtc:
    """The library, with one program at a time."""

    def __init__(self, library: Path) -> None:
        self._builtins = ctypes.CDLL(str(library.with_name(BUILTINS)))  # it looks for these by their name alone
        self._api = ctypes.CDLL(str(library))

    def ptx(self, source: bytes, name: str, options: Sequence[str]) -> str:
        program = ctypes.c_void_p()
        self._run("nvrtcCreateProgram", ctypes.byref(program), source, name.encode(), 0, None, None)
        try:
            given = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
            if self._api.nvrtcCompileProgram(program, len(options), given):
                raise ValueError(self._text("ProgramLog", program))
            return self._text("PTX", program)
        finally:
            self._api.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, what: str, program: ctypes.c_void_p) -> str:
        size = ctypes.c_size_t()
        self._run(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._run(f"nvrtcGet{what}", program, text)
        return text.value.decode()

    def _run(self, name: str, *args: object) -> None:
        code = getattr(self._api, name)(*args)
        if code:
            raise ValueError(f"{name} failed with {code}")
