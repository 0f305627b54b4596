"""Every entry of the lift's table: its op, lifted from a small function of tokens, against torch on random inputs."""

import os
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from planc.compiler.ir.graph import Value
from planc.compiler.lift import lift
from planc.compiler.lift.call import Call
from planc.compiler.lift.table import COMPLEX_RULES, RULES
from planc.errors import PlancError
from tests.compiler.lift.capture import both, recipes, traced
from tests.compiler.lift.cases import complex as complex_
from tests.compiler.lift.cases import logic, pointwise, products, rows, tokens, views
from tests.compiler.lift.cases.common import Case, Cases
from tests.ops_page import PAGE, page

SECTIONS: dict[str, Cases] = {
    "pointwise": pointwise.CASES,
    "logic": logic.CASES,
    "views": views.CASES,
    "rows": rows.CASES,
    "products": products.CASES,
    "tokens": tokens.CASES,
    "complex": complex_.CASES,
    "of complex": complex_.COMPLEX,
}
ENTRIES = [(name, op) for name, cases in SECTIONS.items() for op in cases]


class _Section:
    """The cases of some ops as one function of hidden states: one trace for all of them."""

    def __init__(self, cases: Cases) -> None:
        self.cases, self.widths = cases, dict[Any, int]()

    def __call__(self, model: nn.Module, x: Tensor, positions: Tensor) -> Tensor:
        columns = {op: _columns(op, cases, model, x, positions) for op, cases in self.cases.items()}
        self.widths = {op: int(c.shape[-1]) for op, c in columns.items()}
        return torch.cat(list(columns.values()), -1)


def _columns(op: Any, cases: list[Case], model: nn.Module, x: Tensor, positions: Tensor) -> Tensor:
    outs = [case(op, model, x, positions) for case in cases]
    flat = [o for out in outs for o in (out if isinstance(out, tuple) else (out,))]
    return torch.cat([(o.flatten(2) if o.dim() > 2 else o.unsqueeze(-1)).float() for o in flat], -1)


@cache
def _section(name: str) -> _Section:
    return _Section(SECTIONS[name])


@cache
def _alone(name: str, op: Any) -> _Section:
    return _Section({op: SECTIONS[name][op]})


@cache
def _compared(section: _Section) -> Mapping[Any, tuple[np.ndarray, np.ndarray]] | None:
    """Ours and torch's of each op; None where one of them does not lift."""
    try:
        _, ours, theirs = both(section)
    except PlancError:
        return None
    ends = np.cumsum([0, *section.widths.values()])
    return {op: (ours[:, a:b], theirs[:, a:b]) for op, a, b in zip(section.widths, ends, ends[1:], strict=False)}


@pytest.mark.parametrize(("name", "op"), ENTRIES, ids=str)
def test_lifted_op_equals_torch(name: str, op: Any) -> None:
    section = _section(name)
    if _compared(section) is None:  # the one that is to blame says why; the others are judged by themselves
        section = _alone(name, op)
        both(section)
    found = _compared(section)
    assert found is not None
    ours, theirs = found[op]
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=5e-6)
    assert op in {n.target for n in traced(section).graph.nodes}, "the trace holds another op in its place"


def test_the_page_of_ops_is_what_the_cases_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/ops.md. UPDATE_DOCS=1 rewrites it."""
    emitted: dict[str, set[str]] = defaultdict(set)
    original = Call.emit_many

    def recording(self: Call, op: str, *inputs: str, **attrs: Any) -> tuple[Value, ...]:
        emitted[str(self.node.target).split(".")[1]].add(op)
        return original(self, op, *inputs, **attrs)

    monkeypatch.setattr(Call, "emit_many", recording)
    for name in SECTIONS:
        trace = traced(_section(name))
        lift(trace, recipes(trace.module))
    text = page(emitted)
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(text, encoding="utf-8")
    assert text == PAGE.read_text(encoding="utf-8")


def test_every_entry_has_a_case() -> None:
    known = [op for name, op in ENTRIES if name != "of complex"]
    assert len(known) == len(set(known))
    assert set(known) == set(RULES)
    assert {op for name, op in ENTRIES if name == "of complex"} == set(COMPLEX_RULES)
