"""`planc build --tuning`: in go a file and the targets of a build, out come its tiles, checked before any work."""

from collections.abc import Collection
from pathlib import Path

from planc.codegen.cuda.tiles import name_of, tiles_for
from planc.codegen.target import Target
from planc.errors import UsageError
from planc.plans import schema
from planc.plans.tuning import Tuning, load


def read(path: Path | None, targets: Collection[Target]) -> Tuning | None:
    """The file's entries; None where none was given. UsageError when it has none for the targets, or one that may not
    be used.
    """
    if path is None:
        return None
    tuning = load(path)
    gpus = [t for t in targets if t.kind == "cuda"]
    if not any(tuning.of(name_of(t)) for t in gpus):
        have = ", ".join(sorted({e.target for e in tuning.entries})) or "nothing"
        asked = ", ".join(map(str, targets))
        raise UsageError(
            f"--tuning {path} is for {have}, the build for {asked}; leave it out, or measure with planc tune."
        )
    for target in gpus:
        tiles_for(target, tuning)
    return tuning


def said(tuning: Tuning, target: Target, tiles: Collection[schema.ProductTile]) -> str:
    """How much of the file a plan could use."""
    entries = len(tuning.of(name_of(target)))
    used = {row.product for row in tiles if row.measured}
    known = {row.product for row in tiles}
    return f"tuning: {len(used)} of {entries} measured tiles, of the plan's {len(known)} products by bucket"
