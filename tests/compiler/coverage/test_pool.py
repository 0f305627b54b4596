"""Processes of coverage: a crash and a hang are rows, and end nothing else."""

import os
import sys
import time

from planc.compiler.coverage.check import CRASHED, EXCLUDED, OK, Row
from planc.compiler.coverage.pool import run
from planc.compiler.coverage.types import ModelType


def behave(kind: ModelType) -> Row:
    """Stands in for a check, and does what the type's name says."""
    if kind.name == "aborts":
        os.abort()
    if kind.name == "exits":
        print("last words", file=sys.stderr)
        sys.exit(3)
    if kind.name == "raises":
        raise ValueError("no such thing")
    if kind.name == "hangs":
        time.sleep(600)
    return Row(kind.name, OK)


def test_a_crash_or_a_hang_is_a_row() -> None:
    names = ("aborts", "works", "exits", "raises", "hangs", "works too")
    start = time.monotonic()
    rows = {row.name: row for row in run([ModelType(n) for n in names], jobs=2, limit=20, work=behave)}
    assert time.monotonic() - start < 60
    assert {name: row.verdict for name, row in rows.items() if row.verdict == OK} == {"works": OK, "works too": OK}
    assert rows["aborts"].detail.startswith("killed by SIGABRT")
    assert rows["exits"].detail == "exit code 3: last words"
    assert rows["raises"].detail == "exit code 1: ValueError: no such thing"
    assert rows["hangs"].detail == "no end after 20 s"
    assert {rows[n].verdict for n in ("aborts", "exits", "raises", "hangs")} == {CRASHED}


def test_what_the_config_excludes_needs_no_process() -> None:
    (row,) = run([ModelType("x", excluded="an encoder-decoder")], jobs=1, work=behave)
    assert row == Row("x", EXCLUDED, "an encoder-decoder")
