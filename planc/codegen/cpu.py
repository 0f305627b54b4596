"""The CPU compiler: in goes a program, out comes a folder with its sources, headers and `model.so`.

Objects are cached across builds by kernel name and by a hash of all that makes their bytes: source, headers, flags,
compiler version.
"""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from planc.codegen.program import Program
from planc.codegen.render import INCLUDE
from planc.codegen.target import Target
from planc.errors import PlancError

Progress = Callable[[int, int, str], None]

LIBRARY = "model.so"
# No contraction: a kernel fuses where it says so, hence every instance of a template rounds alike.
_FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Iinclude")
_LINK_FLAGS = ("-shared", "-pthread", "-Wl,--build-id=none")
_INCLUDES = re.compile(r'^#include "(planc/[^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: its command, and the version text that is part of every object's key."""

    command: tuple[str, ...]
    version: str

    def flags(self, target: Target) -> tuple[str, ...]:
        """Flags of one kernel's compilation."""
        return (*_FLAGS, *target.flags)


@lru_cache(maxsize=8)
def compiler(command: str | None = None) -> Compiler:
    """The compiler that `command`, $CXX or `c++` names. PlancError when it does not start."""
    words = tuple(shlex.split(command or os.environ.get("CXX") or "c++"))
    try:
        done = subprocess.run([*words, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as e:
        raise PlancError(
            f"no C++ compiler: `{shlex.join(words)} --version` failed ({e}); install g++ or clang++, or set CXX"
        ) from e
    return Compiler(words, done.stdout.splitlines()[0] if done.stdout else "")


def cache_folder() -> Path:
    """Where objects are kept: $PLANC_CACHE_DIR, else planc under $XDG_CACHE_HOME or ~/.cache; then `kernels`."""
    own = os.environ.get("PLANC_CACHE_DIR")
    base = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "planc"
    return base / "kernels"


def build(
    program: Program, folder: Path, *, progress: Progress = lambda done, total, name: None, cxx: str | None = None
) -> Path:
    """Writes sources and headers to `folder`, compiles and links `folder/model.so`, and returns its path.

    `progress(done, total, name)` is called as each file is compiled. The bytes depend on the program and the compiler
    alone. PlancError holds the command and the compiler's first lines when it fails.
    """
    tool = compiler(cxx)
    sources = program.sources
    headers = write_sources(sources, folder)
    objects = {name: _object_path(name, text, headers, tool, program.target) for name, text in sources.items()}
    missing = [name for name, path in objects.items() if not path.exists()]
    done = len(objects) - len(missing)
    with ThreadPoolExecutor(max_workers=_cores()) as pool:
        jobs = {pool.submit(_compile, name, objects[name], folder, tool, program.target): name for name in missing}
        for job in as_completed(jobs):
            job.result()
            done += 1
            progress(done, len(objects), jobs[job].removesuffix(".cpp"))
    return _link(list(objects.values()), folder, tool)


def write_sources(sources: Mapping[str, str], folder: Path) -> Mapping[str, str]:
    """Writes the sources, and the headers that they include, to `folder`; gives the headers by their include name."""
    headers = _headers(sources.values())
    for name, text in (*sources.items(), *((f"include/{h}", t) for h, t in headers.items())):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return headers


def _headers(sources: Iterator[str] | Mapping[str, str] | object) -> dict[str, str]:
    raise NotImplementedError
