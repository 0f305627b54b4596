"""Which executor runs a plan: in goes a plan, out comes what takes its steps, and what memory its cache may have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from planc.plans.host import available_bytes
from planc.plans.schema import Plan
from planc.runtime.cpu import CpuExecutor
from planc.runtime.ranks import RankedExecutor

if TYPE_CHECKING:
    from planc.runtime.cuda import CudaExecutor
    from planc.runtime.cuda_ranks import CudaRanks


def open_executor(
    root: Path, plan: Plan, num_blocks: int, num_threads: int | None = None
) -> CpuExecutor | RankedExecutor | CudaExecutor | CudaRanks:
    """An executor of all ranks of the plan; `num_threads` are those of all ranks together, and no matter to a GPU."""
    if plan.is_cuda:
        from planc.runtime.cuda import CudaExecutor
        from planc.runtime.cuda_ranks import CudaRanks

        return (CudaRanks if plan.limits.ranks > 1 else CudaExecutor)(root, plan, num_blocks)
    return open_on_cpu(root, plan, num_blocks, num_threads)


def open_on_cpu(
    root: Path, plan: Plan, num_blocks: int, num_threads: int | None = None
) -> CpuExecutor | RankedExecutor:
    """The executor of a plan for a CPU."""
    kind = RankedExecutor if plan.limits.ranks > 1 else CpuExecutor
    return kind(root, plan, num_blocks, num_threads)


def kv_memory(root: Path, plan: Plan, utilization: float) -> int:
    """Bytes that the KV cache of a rank may take: a share of the memory of the machine or its GPU, less what weights
    and activations need. Weights count as used although the kernel could drop their pages: serving needs them.
    """
    if plan.is_cuda:
        from planc.runtime.cuda import kv_memory as of_gpu
        from planc.runtime.cuda_ranks import kv_memory as of_gpus

        return (of_gpus if plan.limits.ranks > 1 else of_gpu)(root, plan, utilization)
    taken = sum((root / name).stat().st_size for name in plan.weight_files if (root / name).exists())
    return (int(utilization * available_bytes()) - taken) // plan.limits.ranks - plan.program.arena_bytes
