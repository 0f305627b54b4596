"""Compiled plans against transformers over configs that a generator draws; a failure names the smallest one."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from planc.compiler.coverage import headers
from planc.compiler.coverage.check import BROKEN, OK, Row, check
from planc.compiler.coverage.types import ModelType
from tests.coverage_page import compiled
from tests.varied import fields_of

# Between them: every norm, biases or none, windows, caps, partial and interleaved rotation, alibi, parallel residuals.
TYPES = ("llama", "qwen3", "gemma2", "gpt_neox", "falcon", "mixtral", "phi3", "olmo2")
FEW = int(os.environ.get("PLANC_EXAMPLES", "3"))
MANY = int(os.environ.get("PLANC_NIGHTLY_EXAMPLES", "4"))  # of each type

# Refusals that are right: transformers itself computes two things.
UNDECIDED = "so its code does not say what the model computes"

calm = settings(
    deadline=None, database=None, print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def parsed_headers() -> Iterator[None]:
    """Every example has kernels of its own: compiling them is most of its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", headers.command())
        yield


def hold(name: str, fields: dict[str, Any]) -> None:
    """Fails unless the plan of the type with these fields computes what transformers does."""
    row: Row = check(ModelType(name), **fields)
    assume(row.verdict != BROKEN)  # transformers itself has no such model
    assume(UNDECIDED not in row.detail)
    assert row.verdict == OK, (
        f"{name} with {fields}: {row.verdict}, error {row.error}, tokens {row.tokens}: {row.detail}"
    )


@settings(calm, max_examples=FEW, derandomize=True)
@given(data=st.data())
def test_a_handful_of_configs(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(TYPES), label="type")
    hold(name, data.draw(fields_of(name), label="fields"))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(compiled()))
@settings(calm, max_examples=MANY)
@given(data=st.data())
def test_many_configs_of_every_type(name: str, data: st.DataObject) -> None:
    hold(name, data.draw(fields_of(name), label="fields"))
