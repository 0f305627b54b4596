"""Checks in processes of their own: in go types, out come rows as they are done; a crash or a hang is a row too."""

import os
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from planc.compiler.coverage import headers
from planc.compiler.coverage.check import CRASHED, Row, check
from planc.compiler.coverage.types import ModelType

LIMIT = 300.0  # seconds of one type
_GRACE = 10.0  # seconds to end by itself, once its row is here


@dataclass
class _Job:
    kind: ModelType
    process: Any
    answer: Connection
    log: Path
    start: float


def run(
    kinds: Sequence[ModelType], *, jobs: int, limit: float = LIMIT, work: Callable[[ModelType], Row] = check
) -> Iterator[Row]:
    """A row for each type, in the order in which they end; `jobs` run at a time, each for `limit` seconds at most."""
    context = get_context("forkserver")  # forks a server that has imported torch and transformers, but run nothing
    context.set_forkserver_preload(["planc.compiler.coverage.check", "planc.compiler.build"])
    told = [kind for kind in kinds if kind.excluded or kind.broken]
    yield from map(check, told)
    waiting, running = deque(kind for kind in kinds if kind not in told), list[_Job]()
    if not waiting:
        return
    compiler = headers.command()
    with tempfile.TemporaryDirectory(prefix="planc-coverage-") as folder:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    running.append(_start(context, waiting.popleft(), Path(folder), (work, compiler)))
                yield from _ended(running, limit)
        finally:
            for job in running:
                _kill(job)


def _start(context: Any, kind: ModelType, folder: Path, task: tuple[Any, str]) -> _Job:
    ours, theirs = context.Pipe(duplex=False)
    log = folder / f"{kind.name}.log"
    process = context.Process(target=_work, args=(kind, theirs, str(log), *task))
    process.start()
    theirs.close()
    return _Job(kind, process, ours, log, time.monotonic())


def _work(kind: ModelType, answer: Connection, log: str, work: Callable[[ModelType], Row], compiler: str) -> None:
    """What the process does: nothing of it reaches the terminal."""
    os.environ["CXX"] = compiler
    os.setsid()  # a compiler that it starts dies with it
    handle = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(handle, stream.fileno())
    import torch

    torch.set_num_threads(1)
    answer.send(work(kind))


def _ended(running: list[_Job], limit: float) -> Iterator[Row]:
    """Waits until a job ends or runs out of time; takes those from the list, and gives their rows."""
    left = min(job.start + limit for job in running) - time.monotonic()
    waits = [item for job in running for item in (job.answer, job.process.sentinel)]
    ready = connection.wait(waits, timeout=max(0.0, left))
    for job in list(running):
        seconds = time.monotonic() - job.start
        if job.answer in ready or job.process.sentinel in ready:
            row = _row(job, seconds)
            job.process.join(_GRACE)
        elif seconds >= limit:
            row = Row(job.kind.name, CRASHED, f"no end after {limit:.0f} s", seconds=round(seconds, 1))
        else:
            continue
        running.remove(job)
        _kill(job)
        yield row


def _row(job: _Job, seconds: float) -> Row:
    with suppress(EOFError, ConnectionError):
        if job.answer.poll(1):
            row: Row = job.answer.recv()
            return row
    job.process.join(_GRACE)
    lines = job.log.read_text(errors="replace").strip().splitlines() if job.log.exists() else []
    code = job.process.exitcode
    ended = f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
    return Row(
        job.kind.name, CRASHED, f"{ended}: {lines[-1] if lines else 'no output'}"[:300], seconds=round(seconds, 1)
    )


def _kill(job: _Job) -> None:
    """Ends the process and what it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(job.process.pid, signal.SIGKILL)
    job.process.kill()
    job.process.join()
    job.process.close()
    job.answer.close()
