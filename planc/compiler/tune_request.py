"""What `planc tune` was asked for: in goes the command line, out come the plan and what is measured already."""

from dataclasses import dataclass
from pathlib import Path

from planc.codegen.target import parse
from planc.compiler.backends import check_tools
from planc.errors import UsageError
from planc.plans import store, tuning
from planc.plans.schema import Plan
from planc.plans.tuning import Tuning
from planc.runtime.cpu import check_threads


@dataclass(frozen=True)
class TuneRequest:
    """`best` tiles of each product are run on GPU number `device`, beside the plan's own; blockings of a CPU are run on
    `threads` threads. None is the default: 4 tiles, the first GPU, all cores.
    """

    plan: Path
    out: Path = Path("tuning.json")
    seconds: float = 60.0
    best: int | None = None
    device: int | None = None
    threads: int | None = None


def checked(request: TuneRequest) -> tuple[Plan, Tuning]:
    """The plan, and what the file that is to be written has already. UsageError for flags that are not its target's."""
    if not 0 < request.seconds < float("inf") or (request.best or 1) < 1 or (request.device or 0) < 0:
        raise UsageError("--seconds must be a number above 0, --best at least 1, and --device 0 or more.")
    check_threads(request.threads)
    if not request.out.absolute().parent.is_dir():
        raise UsageError(f"{request.out.absolute().parent} is no folder; make it, or name another file with -o.")
    plan = store.load(request.plan)
    for name in ("threads",) if plan.is_cuda else ("best", "device"):
        if getattr(request, name) is not None:
            raise UsageError(f"--{name} is not for a plan for {plan.target}; leave it out.")
    known = tuning.load(request.out) if request.out.exists() else Tuning()
    check_tools(parse(plan.target))
    return plan, known
