"""`docs/coverage.md` is what the compiler does today: its list of types, and a sixteenth of its verdicts each time."""

import datetime
import os
from collections import Counter
from importlib.metadata import version

import pytest

from planc.compiler.coverage.check import FAILURES, OK, REFUSED
from planc.compiler.coverage.command import chosen
from planc.compiler.coverage.pool import run
from planc.compiler.coverage.types import names, types
from planc.plans.host import usable_cpus
from tests.coverage_page import PAGE, verdicts

PARTS = 16


def shard() -> str:
    """$PLANC_COVERAGE_SHARD, else the part of the day: after sixteen days each type has had its turn."""
    today = datetime.datetime.now(datetime.UTC).timetuple().tm_yday
    return os.environ.get("PLANC_COVERAGE_SHARD") or f"{today % PARTS + 1}/{PARTS}"


def differences(part: str | None) -> list[str]:
    """What the types of a part give now and the page does not say; made again with one command."""
    expected = verdicts()
    found = []
    for row in run(chosen(types(), (), part), jobs=usable_cpus()):
        if row.verdict != expected.get(row.name):
            found.append(f"{row.name}: {row.verdict}, the page says {expected.get(row.name)}: {row.detail}")
    return found


def test_the_page_lists_the_types_of_the_installed_transformers() -> None:
    assert f"transformers {version('transformers')}" in PAGE.read_text(encoding="utf-8")
    assert sorted(verdicts()) == sorted(names())


def test_the_page_has_nothing_wrong() -> None:
    assert not [name for name, verdict in verdicts().items() if verdict in FAILURES]


def test_no_decoder_is_left_out() -> None:
    """A small config gone wrong may look like an encoder's, or not run."""
    count = Counter(verdicts().values())
    assert count[OK] + count[REFUSED] >= 147
    assert count[OK] >= 105


def test_a_sixteenth_of_the_page_holds() -> None:
    found = differences(shard())
    assert not found, "\n".join([*found, "planc coverage --markdown docs/coverage.md makes the page again"])


@pytest.mark.slow
def test_the_whole_page_holds() -> None:
    assert not differences(None)
