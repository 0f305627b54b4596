"""Tables of rows: in go rows, out come lines for logs, a table for terminals, JSON and Markdown."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from planc.compiler.coverage.check import BROKEN, CRASHED, DECODE, EXCLUDED, OK, PROMPT, REFUSED, TOLERANCE, WRONG, Row

_ORDER = (WRONG, CRASHED, OK, REFUSED, BROKEN, EXCLUDED)
_COLOURS = {OK: "green", REFUSED: "yellow", WRONG: "bold red", CRASHED: "bold red", BROKEN: "dim", EXCLUDED: "dim"}

TITLES = {
    WRONG: "Wrong",
    CRASHED: "Crashed",
    OK: "Compiled",
    REFUSED: "Refused",
    BROKEN: "Not to be run",
    EXCLUDED: "Not text decoders",
}


def ordered(rows: Sequence[Row]) -> list[Row]:
    """Failures first, then by name."""
    return sorted(rows, key=lambda r: (_ORDER.index(r.verdict), r.name))


def summary(rows: Sequence[Row]) -> str:
    """The sum line."""
    count = {verdict: sum(r.verdict == verdict for r in rows) for verdict in _ORDER}
    text = f"{count[OK]} ok, {count[REFUSED]} refused, {count[WRONG]} wrong"
    for verdict in (CRASHED, BROKEN, EXCLUDED):
        if count[verdict]:
            text += f", {count[verdict]} {verdict.lower()}"
    return text


def line(row: Row) -> str:
    """A row in one line."""
    return f"{row.verdict:<13} {row.name:<24} {_error(row):<8} {row.tokens:<6} {_note(row)} ({row.seconds:.1f} s)"


def as_json(rows: Sequence[Row], version: str) -> str:
    """All rows as a JSON text."""
    return json.dumps({"transformers": version, "rows": [asdict(r) for r in ordered(rows)]}, indent=1)


def show(rows: Sequence[Row], console: Console) -> None:
    """The table on a terminal."""
    table = Table("verdict", "type", "error", "tokens", "layers, or the reason", "s", box=None, pad_edge=False)
    for row in ordered(rows):
        verdict = Text(row.verdict, _COLOURS[row.verdict])
        table.add_row(verdict, row.name, _error(row), row.tokens, Text(_note(row)), f"{row.seconds:.1f}")
    console.print(table)


def markdown(rows: Sequence[Row], version: str) -> str:
    """The page `docs/coverage.md`."""
    return "\n".join(_page(ordered(rows), version)) + "\n"


def _page(rows: Sequence[Row], version: str) -> Iterator[str]:
    yield from (
        "# Coverage",
        "",
        f"Every causal-LM type of transformers {version}: {summary(rows)}.",
        "",
        "Made by `planc coverage --markdown docs/coverage.md`: a small random model of each type is compiled in",
        f"float32, prefills {PROMPT} tokens in pieces of several sizes, decodes {DECODE} more, and is compared with",
        f"transformers' float32 logits. Compiled means within {TOLERANCE:.0e} of the largest logit at every position,",
        "and the same tokens.",
    )
    for verdict, title in TITLES.items():
        if some := [r for r in rows if r.verdict == verdict]:
            yield from ("", f"## {title}", "")
            yield from _compiled(some) if verdict == OK else _reasons(some)


def _compiled(rows: Sequence[Row]) -> Iterator[str]:
    yield from ("| type | layers | error | tokens |", "|---|---|---|---|")
    for row in rows:
        yield f"| {row.name} | {row.kinds} | {_error(row)} | {row.tokens} |"


def _reasons(rows: Sequence[Row]) -> Iterator[str]:
    yield from ("| type | layers | reason |", "|---|---|---|")
    for row in rows:
        yield f"| {row.name} | {row.kinds} | {row.detail.replace('|', '/')} |"


def _error(row: Row) -> str:
    return "" if row.error is None else f"{row.error:.0e}"


def _note(row: Row) -> str:
    return f"{row.kinds}: {row.detail}" if row.kinds and row.detail else row.kinds or row.detail
