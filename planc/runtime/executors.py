"""Which executor runs a plan: in goes a plan, out comes what takes its steps."""

from __future__ import annotations

from pathlib import Path

from planc.plans.schema import Plan
from planc.runtime.cpu import CpuExecutor
from planc.runtime.ranks import RankedExecutor


def open_executor(
    root: Path, plan: Plan, num_blocks: int, num_threads: int | None = None
) -> CpuExecutor | RankedExecutor:
    """An executor of all ranks of the plan; `num_threads` are those of all ranks together."""
    kind = RankedExecutor if plan.limits.ranks > 1 else CpuExecutor
    return kind(root, plan, num_blocks, num_threads)
