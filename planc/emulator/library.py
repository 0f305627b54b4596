"""The stand-in for the NVIDIA driver as a library: in goes a function that finds functions, out comes libcuda.so.1.

The library is loaded under the driver's own name before cuda.bindings looks for one, so that no search path changes.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from planc.errors import PlancError
from planc.plans.host import cache_dir

_NAME = "libcuda.so.1"
_SOURCE = Path(__file__).with_name("libcuda.c")
_FLAGS = ("-shared", "-fPIC", "-O1", f"-Wl,-soname,{_NAME}")
_Resolver = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p))
Find = Callable[[str], int | None]  # name of a driver function -> its address


@lru_cache(maxsize=1)
def install(find: Find) -> None:
    """Makes this process's driver the stand-in, whose functions `find` gives; once, for good.

    PlancError when the process has a real driver already, or there is no C compiler.
    """
    _refuse_real_driver()
    library = ctypes.CDLL(str(_built()), mode=ctypes.RTLD_GLOBAL)

    def resolve(name: bytes, out: ctypes._Pointer[ctypes.c_void_p]) -> int:
        address = find(name.decode())
        if address is None:
            return 1
        out[0] = ctypes.c_void_p(address)
        return 0

    resolver = _Resolver(resolve)
    library.planc_set_resolver(resolver)
    _KEPT.append((library, resolver))


_KEPT: list[object] = []  # what C calls must not be collected


def _refuse_real_driver() -> None:
    try:
        ctypes.CDLL(_NAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return
    raise PlancError(
        "this process has loaded the real NVIDIA driver, so the emulated one cannot take its place; "
        "run planc verify --emulate as a process of its own"
    )


def _built() -> Path:
    command = [*shlex.split(os.environ.get("CC") or "cc"), *_FLAGS]
    key = hashlib.sha256(_SOURCE.read_bytes() + shlex.join(command).encode()).hexdigest()[:16]
    path = cache_dir() / "emulator" / key / _NAME
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            made = Path(scratch) / _NAME
            _compile([*command, "-o", str(made), str(_SOURCE)])
            made.replace(path)
    except OSError as e:
        raise PlancError(f"cannot write to the cache {path.parent} ({e}); set PLANC_CACHE_DIR") from None
    return path


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        detail = (done.stderr or f"exit code {done.returncode}") if done.returncode else ""
    except OSError as e:
        detail = str(e)
    if detail:
        raise PlancError(f"the stand-in driver did not compile ({detail.strip()}); install a C compiler, or set CC")
