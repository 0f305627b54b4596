"""Checks a plan against itself and this machine: in goes a directory, out come findings with the fix."""

from dataclasses import dataclass
from pathlib import Path

from planc.errors import PlancError
from planc.plans.host import available_bytes, missing_flags
from planc.plans.schema import Plan
from planc.plans.store import load, members, sha256
from planc.plans.tensors import read_header


@dataclass(frozen=True)
class Finding:
    """One check: what was looked at, whether it holds, and what was seen."""

    name: str
    ok: bool
    detail: str


def check(root: Path) -> list[Finding]:
    """All checks in order: schema, files and hashes, weights, target, memory. A bad schema ends them; none raises."""
    try:
        plan = load(root)
    except PlancError as e:
        return [Finding("schema", False, str(e))]
    found = [Finding("schema", True, f"version {plan.schema_version}")]
    return [*found, *check_files(root, plan), _weights(root, plan), _target(plan), _memory(plan)]


def check_files(root: Path, plan: Plan) -> list[Finding]:
    """Whether the files of the manifest are there as they were written, and no others."""
    out = []
    for name, digest in plan.files.items():
        path = root / name
        if not path.is_file():
            out.append(Finding("files", False, f"{name} is missing; build the plan again"))
        elif sha256(path) != digest:
            out.append(Finding("files", False, f"{name} has changed since the build; build the plan again"))
    extra = sorted(set(members(root)) - set(plan.files))
    out += [Finding("files", False, f"{name} is not in the manifest; remove it") for name in extra]
    return out or [Finding("files", True, f"{len(plan.files)} files have the hashes of the manifest")]


def _weights(root: Path, plan: Plan) -> Finding:
    if not plan.has_weights:
        return Finding("weights", False, "built with --weights none; `planc pack` adds them")
    for rank in range(plan.limits.ranks):
        try:
            have = {name for f in plan.weight_files_of(rank) for name in read_header(root / f)}
        except PlancError as e:
            return Finding("weights", False, str(e))
        missing = [w for w in plan.program.weights if w not in have]
        if missing:
            of = f" of rank {rank}" if plan.limits.ranks > 1 else ""
            told = f"{len(missing)} weights{of} are in no file, first {missing[0]}; build again"
            return Finding("weights", False, told)
    return Finding("weights", True, f"{len(have)} tensors" + (" of each rank" if plan.limits.ranks > 1 else ""))


def _target(plan: Plan) -> Finding:
    if plan.is_cuda:
        return Finding(
            "target", True, f"{plan.target}; planc run looks for that GPU, planc verify --emulate needs none"
        )
    missing = missing_flags(plan.target)
    if missing:
        return Finding(
            "target", False, f"{plan.target} needs {', '.join(missing)}, which this CPU lacks; build with --target cpu"
        )
    return Finding("target", True, f"{plan.target} runs on this CPU")


def _memory(plan: Plan) -> Finding:
    m, free = plan.memory, available_bytes()
    if plan.is_cuda:
        need = m.constants + m.weights + m.arena + m.kv_token * plan.limits.max_model_len
        return Finding("memory", True, f"{need / 2**20:,.0f} MiB of each GPU for weights, arena and one full sequence")
    ranks = plan.limits.ranks
    need = m.constants + ranks * (m.weights + m.arena + m.kv_token * plan.limits.max_model_len)
    of = f" of {ranks} ranks" if ranks > 1 else ""
    detail = f"{need / 2**20:.0f} MiB for weights, arena and one full sequence{of}; {free / 2**20:.0f} MiB available"
    return Finding("memory", need <= free, detail if need <= free else f"{detail}; lower --max-model-len or --dtype")
