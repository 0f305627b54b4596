"""Fixtures of the kernel tests: in goes a module's list of cases, out comes its library for each target."""

import pytest

from tests.kernels.harness import TARGETS, Library


@pytest.fixture(scope="module", params=TARGETS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The kernels of the module's `CASES`, compiled for one target."""
    cases = request.module.CASES
    return Library(
        list(cases.values()) if isinstance(cases, dict) else cases, request.param, tmp_path_factory.mktemp("kernels")
    )
