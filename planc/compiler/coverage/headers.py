"""Faster kernels for many plans at once: out comes a compiler command that reads the standard headers parsed already.

They are most of what compiling a small kernel costs. Objects are bit for bit those that the plain command makes.
"""

import os
import shlex
import subprocess
from pathlib import Path

from planc.codegen import cpu, target
from planc.plans.host import cache_dir

_HEADERS = ("algorithm", "atomic", "cmath", "cstddef", "cstdint", "cstring", "limits", "new", "type_traits", "vector")
_BY_MACHINE = "#if defined(__x86_64__)\n#include <immintrin.h>\n#endif\n"


def command() -> str:
    """The C++ compiler's command, with parsed headers where it is GCC and takes them."""
    tool = cpu.compiler()
    plain = shlex.join(tool.command)
    if "clang" in tool.version.lower():
        return plain
    text = _BY_MACHINE + "".join(f"#include <{name}>\n" for name in _HEADERS)
    header = cache_dir() / "headers" / f"{target.host()}.h".replace(":", "-")
    try:
        header.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        header.write_text(text)
        _parse(tool, header)
    except (OSError, subprocess.CalledProcessError):
        return plain  # slower, and no less right
    return shlex.join([*tool.command, "-include", str(header)])


def _parse(tool: cpu.Compiler, header: Path) -> None:
    """Writes header.h.gch whole: another run may be reading the one that lies there."""
    partial = header.with_suffix(f".{os.getpid()}")
    flags = [flag for flag in tool.flags(target.host()) if flag != "-Iinclude"]
    words = [*tool.command, *flags, "-x", "c++-header", str(header), "-o", str(partial)]
    subprocess.run(words, check=True, capture_output=True)
    os.replace(partial, header.with_suffix(".h.gch"))
