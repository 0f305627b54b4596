"""The verb `planc coverage`: in go its flags, out come the table and whether anything was wrong."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from transformers.utils import logging

from planc.compiler.coverage import pool, report
from planc.compiler.coverage.check import FAILURES, Row
from planc.compiler.coverage.types import ModelType, types
from planc.errors import UsageError
from planc.plans.host import usable_cpus


@dataclass(frozen=True)
class CoverageRequest:
    """What `planc coverage` was asked for. `shard` is I/N: the I-th of N parts, counted from 1."""

    arch: tuple[str, ...] = ()
    jobs: int | None = None
    shard: str | None = None
    limit: float = pool.LIMIT
    as_json: bool = False
    markdown: Path | None = None


def coverage(request: CoverageRequest) -> bool:
    """Checks the types and prints the table; True when nothing was wrong and nothing crashed."""
    logging.set_verbosity_error()  # hundreds of remarks on small configs
    kinds = chosen(types(), request.arch, request.shard)
    jobs = request.jobs or usable_cpus()
    if jobs < 1:
        raise UsageError(f"--jobs must be at least 1, got {jobs}.")
    rows = _watched(pool.run(kinds, jobs=jobs, limit=request.limit), len(kinds))
    made_with = version("transformers")
    if request.as_json:
        print(report.as_json(rows, made_with))
    else:
        if sys.stdout.isatty():
            report.show(rows, Console())
        print(report.summary(rows))
    if request.markdown:
        request.markdown.write_text(report.markdown(rows, made_with), encoding="utf-8")
    return not any(row.verdict in FAILURES for row in rows)


def chosen(kinds: Sequence[ModelType], arch: Sequence[str], shard: str | None) -> list[ModelType]:
    """The types that were asked for by name, then the shard of them. UsageError for what is not there."""
    known = {kind.name for kind in kinds}
    for name in arch:
        if name not in known:
            raise UsageError(f"--arch {name} is no causal-LM type of the installed transformers; see docs/coverage.md.")
    some = [kind for kind in kinds if not arch or kind.name in arch]
    return some if shard is None else _part(some, shard)


def _part(kinds: list[ModelType], shard: str) -> list[ModelType]:
    part, _, parts = shard.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise UsageError(f"--shard must be I/N with I from 1 to N, got {shard}.")
    return kinds[int(part) - 1 :: int(parts)]


def _watched(rows: Iterable[Row], total: int) -> list[Row]:
    """All rows: under a bar where a person watches, a line each elsewhere."""
    console = Console(stderr=True, highlight=False)
    if not (console.is_terminal and sys.stderr.isatty()):
        return [_told(row, console) for row in rows]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    made: list[Row] = []
    with RichProgress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("coverage", total=total)
        for row in rows:
            made.append(row)
            bar.update(task, completed=len(made), description=f"coverage {report.summary(made)}")
    return made


def _told(row: Row, console: Console) -> Row:
    console.print(report.line(row), soft_wrap=True, markup=False)
    return row
