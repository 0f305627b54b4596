"""`planc run` that notes its steps: `python -m benchmarks.timed_run FILE PLAN [FLAGS]` writes a line for each at last.

A line is a step's tokens, and the seconds when its kernels were started and when they were done.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from planc.cli import main
from planc.runtime.cpu import CpuExecutor


def noted(steps: list[tuple[int, float, float]]) -> None:
    """Has every executor note the steps that choose tokens."""
    run = CpuExecutor.sample_step

    def timed(self: CpuExecutor, batch: Any, records: Any) -> Any:
        start = time.perf_counter()
        found = run(self, batch, records)
        steps.append((len(batch.ids), start, time.perf_counter()))
        return found

    CpuExecutor.sample_step = timed  # type: ignore[method-assign]


if __name__ == "__main__":
    out, *flags = sys.argv[1:]
    seen: list[tuple[int, float, float]] = []
    noted(seen)
    try:
        main(["run", *flags])
    finally:
        Path(out).write_text("".join(f"{json.dumps(step)}\n" for step in seen))
