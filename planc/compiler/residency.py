"""Bounds the memory of running a plan inside a build: in goes an executor, weights beyond a share are given back."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from planc.runtime.cpu import CpuExecutor
from planc.runtime.ranks import RankedExecutor

_PERIOD = 0.01  # seconds; a step reads some 20 GB/s, so about 200 MB become resident between two releases
_SMALL = 256 << 20  # bytes of weights that may stay resident


@contextmanager
def bounded(executor: CpuExecutor | RankedExecutor, weight_bytes: int) -> Iterator[None]:
    """While the block runs, mapped weights do not pile up in this process.

    A build's memory must not grow with the model. Released pages stay in the system's page cache for as long as it has
    room, so that using them again is cheap.
    """
    if weight_bytes <= _SMALL:
        yield
        return
    done = threading.Event()

    def release() -> None:
        while not done.wait(_PERIOD):
            executor.release_weights()

    thread = threading.Thread(target=release, name="planc-release", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
