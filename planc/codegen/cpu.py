"""The CPU compiler: in goes a program, out comes a folder with its sources, headers and `model.so`.

Objects are cached across builds by kernel name and by a hash of all that makes their bytes: source, headers, the
compiler's command and version, flags.
"""

import hashlib
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from planc.codegen.program import Program
from planc.codegen.render import INCLUDE
from planc.codegen.target import Target
from planc.errors import PlancError
from planc.plans.host import cache_dir, usable_cpus

Progress = Callable[[int, int, str], None]

LIBRARY = "model.so"
# No contraction: a kernel fuses where it says so, hence every instance of a template rounds alike.
_FLAGS = (
    "-std=c++20",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fPIC",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Iinclude",
)
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


def build(
    program: Program, folder: Path, *, progress: Progress = lambda done, total, name: None, cxx: str | None = None
) -> Path:
    """Writes sources and headers to `folder`, compiles and links `folder/model.so`, and returns its path.

    `progress(done, total, name)` is called as each file is compiled. The bytes depend on the program and the compiler
    alone. PlancError holds the command and the compiler's first lines when it fails.
    """
    return build_library(program.sources, program.target, folder, progress=progress, cxx=cxx)


def build_library(
    sources: Mapping[str, str],
    target: Target,
    folder: Path,
    *,
    progress: Progress = lambda done, total, name: None,
    cxx: str | None = None,
) -> Path:
    """Like `build`, for any C++ sources by file name."""
    tool = compiler(cxx)
    write_sources(sources, folder)
    objects = {name: _object_path(name, text, tool, target) for name, text in sources.items()}
    missing = [name for name, path in objects.items() if not path.exists()]
    hits = len(objects) - len(missing)
    with _pool() as pool:
        jobs = {pool.submit(_compile, name, objects[name], folder, tool, target): name for name in missing}
        for done, job in enumerate(as_completed(jobs), hits + 1):
            job.result()
            progress(done, len(objects), jobs[job].removesuffix(".cpp"))
    return _link(tuple(objects.values()), folder, tool)


@contextmanager
def _pool() -> Iterator[ThreadPoolExecutor]:
    """A thread for each CPU; an error or Ctrl-C waits for the compilers that run, and starts no others."""
    with ThreadPoolExecutor(max_workers=usable_cpus()) as pool:
        try:
            yield pool
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def write_sources(sources: Mapping[str, str], folder: Path) -> None:
    """Writes the sources, and under `include/` the headers that they need, so that the folder compiles by hand."""
    files = dict(sources)
    for text in sources.values():
        files |= {f"include/{name}": header for name, header in _headers(text).items()}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def _headers(source: str) -> dict[str, str]:
    """Every header of ours that a source includes, directly or not, by include name."""
    found: dict[str, str] = {}
    todo = _INCLUDES.findall(source)
    while todo:
        name = todo.pop()
        if name not in found:
            found[name] = (INCLUDE / name).read_text()
            todo += _INCLUDES.findall(found[name])
    return found


def _object_path(name: str, source: str, tool: Compiler, target: Target) -> Path:
    """Where the cache keeps the object of a source; the name holds a hash of everything that makes its bytes."""
    parts = [name, source, *tool.command, tool.version, *tool.flags(target)]
    parts += [text for _, text in sorted(_headers(source).items())]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    return cache_dir() / "kernels" / f"{name.removesuffix('.cpp')}-{digest}.o"


def _compile(name: str, to: Path, folder: Path, tool: Compiler, target: Target) -> None:
    """Compiles `folder/name` to the cache; a half-written object never bears its final name."""
    try:
        for made in (to.parent.parent, to.parent):  # what is linked into plans is for no one else to write
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(suffix=".o", dir=to.parent)
    except OSError as e:
        raise PlancError(f"cannot write to the kernel cache {to.parent}: {e}; set PLANC_CACHE_DIR") from e
    os.close(handle)
    try:
        _run([*tool.command, *tool.flags(target), "-c", name, "-o", partial], folder)
        os.replace(partial, to)
    finally:
        Path(partial).unlink(missing_ok=True)


def _link(objects: Sequence[Path], folder: Path, tool: Compiler) -> Path:
    _run([*tool.command, *_LINK_FLAGS, "-o", LIBRARY, *map(str, objects)], folder)
    return folder / LIBRARY


def _run(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).splitlines()
        errors = [line for line in lines if "error" in line] or lines
        raise PlancError(f"the C++ compiler failed in {folder}: `{shlex.join(command)}`: " + " | ".join(errors[:3]))
