"""A plan of several ranks: in go steps, which a process for each further rank takes too; out come the same logits.

This process is rank 0. Ranks share one memory: the collectives of the plan's program first, then two places for the
arrays of a step, taken in turn. A step is announced through a pipe, so that idle ranks sleep. When a rank is gone the
others stop waiting for it, and every later step says which one it was; when this process is gone, the others end.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import selectors
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from planc.errors import PlancError
from planc.plans.host import usable_cores
from planc.plans.schema import Plan
from planc.runtime.batch import Batch, Int32
from planc.runtime.cpu import CpuExecutor, check_threads
from planc.runtime.rank import HEAD, RELEASE, Places

log = logging.getLogger("planc.ranks")
START_SECONDS = 120  # for a rank to map its weights and load its program
END_SECONDS = 10

T = TypeVar("T")


@dataclass
class _Follower:
    """A further rank: its process, the pipes of its steps and its life, and the one that it answers through."""

    rank: int
    process: subprocess.Popen[bytes]
    steps: int
    life: int
    answers: int

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.process.pid})"

    def ended(self) -> str:
        """How the process ended, once it has closed its pipe."""
        try:
            code = self.process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            return f"{self.name} closed its pipe"
        if code < 0:
            return f"{self.name} was ended by {_signal_name(-code)}"
        return f"{self.name} ended with exit code {code}"


class RankedExecutor:
    """Runs a plan of more than one rank. Threads are shared out among the ranks, at least one each.

    Raises PlancError when a rank does not start, with what it said.
    """

    def __init__(self, root: Path, plan: Plan, num_blocks: int, num_threads: int | None = None) -> None:
        check_threads(num_threads)
        self._ranks, self._lock = plan.limits.ranks, threading.Lock()
        each = max(1, (num_threads or usable_cores()) // self._ranks)
        self._own = CpuExecutor(root, plan, num_blocks, each)
        self.num_blocks, self.block_size, self.vocab_size = num_blocks, plan.kv.block_size, plan.limits.vocab_size
        self._followers: list[_Follower] = []
        self.failure: str | None = None
        self._on_failure: Callable[[str], None] = lambda why: None
        self._closing = threading.Event()
        self._memory, handle = _shared_memory(self._own.group_bytes() + Places.size(plan, num_blocks))
        try:
            for rank in range(1, self._ranks):
                self._followers.append(_start(rank, handle))
            for follower in self._followers:  # they have started together by now
                _send_plan(follower, root, plan, num_blocks, each)
            self._own.join(self._memory, 0, self._ranks * each)
            for follower in self._followers:
                _await_start(follower)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(handle)
        self._places = Places(self._memory, self._own.group_bytes(), plan, num_blocks)
        self._watcher = threading.Thread(target=self._watch, name="planc-ranks", daemon=True)
        self._watcher.start()

    def on_failure(self, call: Callable[[str], None]) -> None:
        """Have `call` told, from a thread, which rank is gone; at once when one is gone already."""
        with self._lock:
            self._on_failure, failure = call, self.failure
        if failure is not None:
            call(failure)

    def step(self, batch: Batch) -> NDArray[np.float32]:
        """Run one step on every rank; logits [R, vocab_size], overwritten by the next one."""
        return self._together(batch, lambda: self._own.step(batch))

    @property
    def samples(self) -> bool:
        """Whether the plan's program chooses tokens."""
        return self._own.samples

    def sample_step(self, batch: Batch, records: Int32) -> tuple[Int32, NDArray[np.float32]]:
        """Run one step on every rank, and choose the tokens of its rows on this one."""
        return self._together(batch, lambda: self._own.sample_step(batch, records))

    def _together(self, batch: Batch, own: Callable[[], T]) -> T:
        """Have every other rank take the step, and this one by `own`."""
        self._check()
        head = self._places.write(batch)  # before anything is announced: a batch that does not fit must stop no rank
        for follower in self._followers:
            try:
                os.write(follower.steps, head)
            except OSError:
                self._fail(follower.ended())
        self._check()
        try:
            return own()
        except PlancError:
            self._failed_step()
            raise

    def release_weights(self) -> None:
        """Give the resident pages of the weights back to the system, on every rank, at any time."""
        self._own.release_weights()
        for follower in self._followers:
            try:
                os.write(follower.life, RELEASE)
            except OSError:  # it is gone, and the watcher says so
                log.debug("%s is gone", follower.name)

    def close(self) -> None:
        """End the other ranks and the thread pool. Doing it twice is harmless."""
        self._closing.set()
        for follower in self._followers:
            os.close(follower.steps)
            os.close(follower.life)
        for follower in self._followers:
            try:
                follower.process.wait(timeout=END_SECONDS)
            except subprocess.TimeoutExpired:
                follower.process.kill()
                follower.process.wait()
        if self._followers and hasattr(self, "_watcher"):
            self._watcher.join()
        for follower in self._followers:
            os.close(follower.answers)
        self._followers = []
        self._own.close()

    def _check(self) -> None:
        if self.failure is not None:
            raise PlancError(f"{self.failure}, and the plan's {self._ranks} ranks run together; start it again")

    def _failed_step(self) -> None:
        """A step that failed because a rank is gone says which: the watcher knows within moments."""
        if self._own.group_failed():
            self._watcher.join(timeout=END_SECONDS)
            self._check()

    def _watch(self) -> None:
        """Waits for the first rank to close its pipe."""
        with selectors.DefaultSelector() as selector:
            for follower in self._followers:
                selector.register(follower.answers, selectors.EVENT_READ, follower)
            (key, _), *_ = selector.select()
        if not self._closing.is_set():
            self._fail(key.data.ended())

    def _fail(self, why: str) -> None:
        with self._lock:
            if self.failure is not None:
                return
            self.failure, call = why, self._on_failure
            self._own.fail_group()
        log.error("%s", why)
        call(why)


def _shared_memory(size: int) -> tuple[mmap.mmap, int]:
    """Memory of zeros that other processes can map, and its file descriptor."""
    try:
        if hasattr(os, "memfd_create"):
            handle = os.memfd_create("planc-ranks")
        else:
            handle, path = tempfile.mkstemp(prefix="planc-ranks-")
            os.unlink(path)
        os.truncate(handle, size)
        return mmap.mmap(handle, size), handle
    except OSError as e:
        raise PlancError(f"{size} bytes for the memory that ranks share cannot be had ({e})") from e


def _start(rank: int, memory: int) -> _Follower:
    """The process of a rank. It has a process group of its own: Ctrl-C is for rank 0, which ends it."""
    (steps, to_steps), (life, to_life), (from_answers, answers) = os.pipe(), os.pipe(), os.pipe()
    inherited = (steps, life, answers, memory)
    command = [sys.executable, "-m", "planc.runtime.rank", *map(str, inherited)]
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        process = subprocess.Popen(
            command,
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            process_group=0,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )
    except OSError as e:
        raise PlancError(f"the process of rank {rank} cannot be started ({e})") from e
    finally:
        for fd in (steps, life, answers):
            os.close(fd)
    return _Follower(rank, process, to_steps, to_life, from_answers)


def _send_plan(follower: _Follower, root: Path, plan: Plan, num_blocks: int, threads: int) -> None:
    job = {"rank": follower.rank, "root": str(root.resolve()), "num_blocks": num_blocks, "threads": threads}
    text = json.dumps(job | {"plan": asdict(plan)}).encode()
    view = memoryview(struct.pack(HEAD, len(text), 0, 0, 0) + text)
    try:
        while view:
            view = view[os.write(follower.steps, view) :]
    except OSError as e:
        raise PlancError(f"{follower.ended()} before it had read its plan") from e


def _await_start(follower: _Follower) -> None:
    """Waits until the rank is ready; PlancError with what it said instead."""
    said = b""
    with selectors.DefaultSelector() as selector:
        selector.register(follower.answers, selectors.EVENT_READ)
        while not said.endswith(b"\n"):
            if not selector.select(START_SECONDS):
                raise PlancError(f"{follower.name} was not ready within {START_SECONDS} s")
            more = os.read(follower.answers, 1 << 16)
            if not more:
                raise PlancError(f"{follower.ended()} while it started")
            said += more
    answer = json.loads(said)
    if answer is not None:
        raise PlancError(f"rank {follower.rank}: {answer}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
