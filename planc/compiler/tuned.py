"""`planc build --tuning`: in go a file and the targets of a build, out come its entries, checked before any work."""

from collections.abc import Collection
from pathlib import Path

from planc.codegen.cpu_blocking import blockings_for
from planc.codegen.cuda.tiles import name_of, tiles_for
from planc.codegen.target import Target
from planc.compiler.backends import Generated
from planc.errors import UsageError
from planc.plans.tuning import Tuning, load


def read(path: Path | None, targets: Collection[Target]) -> Tuning | None:
    """The file's entries; None where none was given. UsageError when it has none for the targets, or one that may not
    be used.
    """
    if path is None:
        return None
    tuning = load(path)
    if not any(_entries(tuning, t) for t in targets):
        have = ", ".join(tuning.targets) or "nothing"
        asked = ", ".join(map(str, targets))
        raise UsageError(
            f"--tuning {path} is for {have}, the build for {asked}; leave it out, or measure with planc tune."
        )
    for target in targets:
        if target.kind == "cuda":
            tiles_for(target, tuning)
        else:
            blockings_for(target, tuning)
    return tuning


def said(tuning: Tuning, target: Target, made: Generated) -> str:
    """How much of the file a plan could use."""
    entries = _entries(tuning, target)
    if target.kind == "cpu":
        return f"tuning: {len(made.blockings)} of {entries} measured products"
    used = {row.product for row in made.tiles if row.measured}
    known = {row.product for row in made.tiles}
    return f"tuning: {len(used)} of {entries} measured tiles, of the plan's {len(known)} products by bucket"


def _entries(tuning: Tuning, target: Target) -> int:
    return len(tuning.of(name_of(target)) if target.kind == "cuda" else tuning.blockings(str(target)))
