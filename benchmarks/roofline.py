"""What can this machine do at most? In goes a plan for this CPU, out come the rates that `planc bench` measures.

GB/s read from memory, and 10^9 operations a second: on f32, on integers as 8-bit weights are multiplied (bytes with
VNNI, else pairs of 16 bits), and on bf16 as those weights are (f32 where the plan's target has no such instructions).
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from benchmarks.common import row
from planc.compiler.bench import Limits
from planc.plans import store
from planc.plans.host import usable_cores
from planc.runtime.cpu import CpuExecutor


def limits(root: Path, threads: int, seconds: float) -> Limits:
    """The rates of so many threads, each measured for so long."""
    executor = CpuExecutor(root, store.load(root), 1, threads)
    try:
        return Limits.measured(executor, threads, seconds)
    finally:
        executor.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, usable_cores()}))
    parser.add_argument("--seconds", type=float, default=0.5)
    args = parser.parse_args()
    for threads in args.threads:
        row(benchmark="roofline", threads=threads, **asdict(limits(args.plan, threads, args.seconds)))


if __name__ == "__main__":
    main()
