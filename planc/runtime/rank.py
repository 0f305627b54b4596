"""The process of a rank beyond the first: in come steps through a pipe and shared memory, until rank 0 is gone.

Started by ranks.py as `python -m planc.runtime.rank STEPS LIFE ANSWERS MEMORY`, which are file descriptors.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import struct
import sys
import threading
from pathlib import Path

import numpy as np

from planc.errors import PlancError
from planc.plans.codec import decode
from planc.plans.schema import Plan
from planc.runtime.batch import Batch, Int32
from planc.runtime.cpu import CpuExecutor

HEAD = "<4i"  # of a step: tokens, sequences, rows, pages a sequence
RELEASE = b"r"
_ARRAYS = ("ids", "positions", "slots", "page_table", "query_start", "logit_rows")


class Places:
    """Two places for the arrays of a step in memory that ranks share.

    A place is written again when the step between has ended: all ranks were in it, so none reads the step before.
    """

    def __init__(self, memory: mmap.mmap, offset: int, plan: Plan, num_blocks: int) -> None:
        self._each = self.size(plan, num_blocks) // 8
        self._ints = np.frombuffer(memory, np.int32, 2 * self._each, offset)
        self._limits, self._pages = plan.limits, _pages(plan, num_blocks)
        self._step = 0

    @staticmethod
    def size(plan: Plan, num_blocks: int) -> int:
        """Size of both places."""
        limits = plan.limits
        seqs, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        return 8 * (3 * tokens + seqs * _pages(plan, num_blocks) + (seqs + 1) + seqs)

    def write(self, batch: Batch) -> bytes:
        """Puts a step in the next place; gives its announcement. PlancError when the plan has no room for it."""
        head = (len(batch.ids), len(batch.page_table), len(batch.logit_rows), batch.page_table.shape[1])
        most = (self._limits.max_num_batched_tokens, self._limits.max_num_seqs, self._limits.max_num_seqs, self._pages)
        if any(n > m for n, m in zip(head, most, strict=True)) or not head[0]:
            raise PlancError(f"a step of {head[0]} tokens, {head[1]} sequences and {head[2]} rows; the plan has {most}")
        for name, place in zip(_ARRAYS, self._next(*head), strict=True):
            place[...] = getattr(batch, name)
        return struct.pack(HEAD, *head)

    def read(self, head: bytes) -> Batch:
        """The step that was announced."""
        return Batch(*self._next(*struct.unpack(HEAD, head)))

    def _next(self, tokens: int, seqs: int, rows: int, pages: int) -> list[Int32]:
        at = self._step % 2 * self._each
        self._step += 1
        out = []
        for shape in ((tokens,), (tokens,), (tokens,), (seqs, pages), (seqs + 1,), (rows,)):
            size = int(np.prod(shape))
            out.append(self._ints[at : at + size].reshape(shape))
            at += size
        return out


def _pages(plan: Plan, num_blocks: int) -> int:
    """Entries of a row of the page table, at most."""
    return max(num_blocks, plan.sequence_pages)


def main(steps: int, life: int, answers: int, memory_fd: int) -> int:
    """Takes steps until rank 0 closes their pipe; the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 lets its requests end first
    (size, *_) = struct.unpack(HEAD, _read(steps, struct.calcsize(HEAD)))
    job = json.loads(_read(steps, size))
    plan = decode(Plan, job["plan"])
    try:
        executor = CpuExecutor(Path(job["root"]), plan, job["num_blocks"], job["threads"], rank=job["rank"])
        memory = mmap.mmap(memory_fd, 0)
        executor.join(memory, job["rank"], plan.limits.ranks * job["threads"])
    except PlancError as e:
        os.write(answers, json.dumps(str(e)).encode() + b"\n")
        return 1
    threading.Thread(target=_watch, args=(life, executor), daemon=True).start()
    places = Places(memory, executor.group_bytes(), plan, job["num_blocks"])
    os.write(answers, b"null\n")
    try:
        while head := _read(steps, struct.calcsize(HEAD)):
            executor.step(places.read(head))
    except PlancError as e:
        if not executor.group_failed():
            print(f"planc: rank {job['rank']}: {e}", file=sys.stderr)
        return 1
    return 0


def _read(fd: int, size: int) -> bytes:
    """Exactly `size` bytes, or none where the pipe ends."""
    data = b""
    while len(data) < size:
        more = os.read(fd, size - len(data))
        if not more:
            return b""
        data += more
    return data


def _watch(life: int, executor: CpuExecutor) -> None:
    """Does what is asked for between steps; ends the process when rank 0 is gone, in whatever step it may be."""
    while os.read(life, 1) == RELEASE:
        executor.release_weights()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
