"""The CUDA compiler: in go kernels and an SM, out come `<name>.cubin` and `<name>.ptx`; it needs no GPU.

Binaries are cached across builds by kernel name and by a hash of all that makes their bytes: source, constants, types,
options, SM, versions of the compilers.
"""

import hashlib
import json
import os
import queue
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from planc.codegen.cuda import cubin, gate
from planc.codegen.cuda.call import TritonKernel
from planc.codegen.cuda.toolchain import Toolchain, Worker, toolchain
from planc.codegen.skus import SMS
from planc.errors import PlancError
from planc.plans.host import cache_dir, usable_cpus
from planc.plans.launches import Binary

Progress = Callable[[int, int, str], None]

KERNELS = Path(__file__).parent / "kernels"
_FORMAT = "2"  # of what the cache holds; a change makes every entry new
# Parameters that a compiler appends: Triton, pointers to its scratch and its profiler's, which no kernel of ours uses.
_HIDDEN = {".py": 2, ".cu": 0}
_PARTS = (".cubin", ".ptx", ".json")
_IMPORTED = re.compile(r"^from planc\.codegen\.cuda\.kernels\.(\w+) import", re.MULTILINE)


def compile(
    kernels: Sequence[TritonKernel],
    arch: int,
    folder: Path,
    *,
    progress: Progress = lambda done, total, name: None,
    sources: Path = KERNELS,
) -> tuple[Binary, ...]:
    """Compiles kernels for an SM (90: sm_90a) into `folder`, and returns what a launch needs of each, in their order.

    Kernels of one name are one kernel. `progress(done, total, name)` is called as each is compiled. Equal kernels give
    equal bytes, from whatever folder. PlancError names the kernel that does not compile or that fails the gate, or the
    extra that is not installed.
    """
    tools = toolchain()
    folder.mkdir(parents=True, exist_ok=True)
    places = {k.name: _place(k, arch, tools, sources) for k in kernels}
    jobs = {k.name: _job(k, arch, sources) for k in kernels if not _cached(places[k.name])}
    done = len(places) - len(jobs)
    with _pool(tools, min(usable_cpus(), len(jobs))) as compiled:
        for name in compiled(jobs, places):
            done += 1
            progress(done, len(places), name)
    unique = {k.name: k for k in kernels}
    return tuple(_fetch(kernel, arch, places[name], folder) for name, kernel in unique.items())


def _place(kernel: TritonKernel, arch: int, tools: Toolchain, sources: Path) -> Path:
    """Where the cache keeps a kernel, without the suffix; the name holds a hash of all that makes its bytes."""
    job = _job(kernel, arch, sources) | {"source": _text(sources / f"{kernel.source}{kernel.suffix}")}
    text = json.dumps([_FORMAT, *tools.versions(kernel.suffix), job], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:24]
    return cache_dir() / "kernels" / f"{kernel.name}-sm{arch}-{digest}.cubin"


def _text(source: Path) -> str:
    """A source, and behind it those that it imports functions of."""
    text = source.read_text()
    return text + "".join(_text(KERNELS / f"{name}.py") for name in _IMPORTED.findall(text))


def _cached(place: Path) -> bool:
    return all(place.with_suffix(suffix).exists() for suffix in _PARTS)


def _job(kernel: TritonKernel, arch: int, sources: Path) -> dict[str, Any]:
    return {
        "source": str(sources / f"{kernel.source}{kernel.suffix}"),
        "function": kernel.function,
        "signature": dict(kernel.signature),
        "constants": dict(kernel.constants),
        "aligned": sorted(kernel.aligned),
        "num_warps": kernel.num_warps,
        "num_stages": kernel.num_stages,
        "arch": arch,
    }


@contextmanager
def _pool(tools: Toolchain, size: int) -> Iterator[Callable[[dict[str, Any], dict[str, Path]], Iterator[str]]]:
    """Gives a function that compiles jobs to their places and yields their names as they are done.

    There is one process a CPU. An error or Ctrl-C ends them at once.
    """
    if not size:
        yield lambda jobs, places: iter(())
        return
    workers: queue.Queue[Worker] = queue.Queue()
    started = [Worker(tools) for _ in range(size)]
    for worker in started:
        workers.put(worker)

    def one(name: str, job: dict[str, Any], place: Path) -> str:
        worker = workers.get()
        try:
            _compile(name, job, place, worker, tools)
        finally:
            workers.put(worker)
        return name

    pool = ThreadPoolExecutor(max_workers=size)
    try:
        yield lambda jobs, places: (
            f.result() for f in as_completed([pool.submit(one, n, j, places[n]) for n, j in jobs.items()])
        )
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in started:
            worker.close()


def _compile(name: str, job: dict[str, Any], place: Path, worker: Worker, tools: Toolchain) -> None:
    """Compiles to the cache, where an entry is whole once it has all parts."""
    with _partial(place) as partial:
        try:
            answer = worker.compile(job | {"out": str(partial)})
            binary = _binary(name, answer, job, Path(f"{partial}.cubin").read_bytes())
            counts = gate.instructions(Path(f"{partial}.cubin"), tools.disassembler)
        except PlancError as e:
            raise PlancError(f"kernel {name} does not compile for SM {job['arch']}: {e}") from e
        Path(f"{partial}.json").write_text(json.dumps({"binary": vars(binary), "counts": counts}))
        for suffix in _PARTS:
            os.replace(f"{partial}{suffix}", place.with_suffix(suffix))


@contextmanager
def _partial(place: Path) -> Iterator[Path]:
    """A path beside `place` to write to, in a folder of its own that goes away."""
    try:
        for made in (place.parent.parent, place.parent):  # what is linked into plans is for no one else to write
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=place.parent))
    except OSError as e:
        raise PlancError(f"cannot write to the kernel cache {place.parent}: {e}; set PLANC_CACHE_DIR") from e
    try:
        yield folder / "kernel"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _binary(name: str, answer: dict[str, Any], job: dict[str, Any], data: bytes) -> Binary:
    """What a launch needs. PlancError when the cubin does not have the parameters that the signature says."""
    entry = answer["entry"]
    if answer["scratch"]:
        raise PlancError(f"it asks for {answer['scratch']} B of scratch memory, which no launch provides")
    found = cubin.read(data).kernels[entry]
    arguments, hidden = len(job["signature"]), _HIDDEN[Path(job["source"]).suffix]
    if len(found.params) != arguments + hidden:
        raise PlancError(f"it has {len(found.params)} parameters, expected {arguments} and {hidden} of the compiler")
    return Binary(name, entry, found.threads, answer["shared"], found.params, hidden)


def _fetch(kernel: TritonKernel, arch: int, place: Path, folder: Path) -> Binary:
    """Copies a binary from the cache, past the gate."""
    found = json.loads(place.with_suffix(".json").read_text())
    places = tuple((offset, size) for offset, size in found["binary"]["params"])
    binary = Binary(**found["binary"] | {"params": places})
    data = place.with_suffix(".cubin").read_bytes()
    gate.check(kernel, binary, cubin.read(data), found["counts"], SMS[arch])
    (folder / f"{kernel.name}.cubin").write_bytes(data)
    shutil.copyfile(place.with_suffix(".ptx"), folder / f"{kernel.name}.ptx")
    return binary
