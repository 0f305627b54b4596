"""Tables of coverage: the sum line, JSON, Markdown, and which types were asked for."""

import json
from typing import Any

import pytest
from click.testing import CliRunner

from planc.cli import main
from planc.compiler.coverage import command, report
from planc.compiler.coverage.check import CRASHED, EXCLUDED, OK, REFUSED, WRONG, Row
from planc.compiler.coverage.command import chosen
from planc.compiler.coverage.types import ModelType
from planc.errors import UsageError

ROWS = [
    Row("b", REFUSED, "an op | of no kind"),
    Row("a", OK, kinds="sliding, full", error=3e-7, tokens="equal", seconds=2.0),
    Row("c", EXCLUDED, "an encoder-decoder"),
]


def test_the_sum_line_counts_verdicts() -> None:
    assert report.summary(ROWS) == "1 ok, 1 refused, 0 wrong, 1 not a decoder"


def test_markdown_lists_every_type_once() -> None:
    page = report.markdown(ROWS, "5.0")
    assert "Every causal-LM type of transformers 5.0: 1 ok, 1 refused, 0 wrong, 1 not a decoder." in page
    assert "| a | sliding, full | 3e-07 | equal |" in page
    assert "| b |  | an op / of no kind |" in page


def test_json_holds_all() -> None:
    table = json.loads(report.as_json(ROWS, "5.0"))
    assert table["transformers"] == "5.0"
    assert [r["name"] for r in table["rows"]] == ["a", "b", "c"]
    assert table["rows"][0]["error"] == 3e-7


def test_shards_part_the_list() -> None:
    kinds = [ModelType(n) for n in "abcdefg"]
    parts = [chosen(kinds, (), f"{i}/3") for i in (1, 2, 3)]
    assert sorted(k.name for part in parts for k in part) == list("abcdefg")
    assert [k.name for k in chosen(kinds, ("c", "a"), None)] == ["a", "c"]


@pytest.mark.parametrize("shard", ["0/3", "4/3", "1", "x/2", "1/0"])
def test_a_shard_that_is_none_is_refused(shard: str) -> None:
    with pytest.raises(UsageError, match="--shard must be I/N"):
        chosen([ModelType("a")], (), shard)


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(UsageError, match="--arch zz is no causal-LM type"):
        chosen([ModelType("a")], ("zz",), None)


@pytest.mark.parametrize(("verdict", "code"), [(OK, 0), (REFUSED, 0), (WRONG, 1), (CRASHED, 1)])
def test_the_exit_code_tells_what_went_wrong(monkeypatch: Any, verdict: str, code: int) -> None:
    monkeypatch.setattr(command, "types", lambda: [ModelType("a")])
    monkeypatch.setattr(command.pool, "run", lambda kinds, **_: [Row(k.name, verdict, "why") for k in kinds])
    done = CliRunner().invoke(main, ["coverage", "--arch", "a"])
    assert done.exit_code == code
    assert report.summary([Row("a", verdict)]) in done.stdout
