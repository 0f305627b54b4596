"""Fixtures of the kernel tests: in goes a module's list of cases, out comes its library for each target."""

import pytest

from tests.kernels.harness import TARGETS, Library

# Between AVX2 and AVX-512 with products of bytes and bf16, of both of which its kernels are made: what takes longest to
# compile leaves it to the nightly run.
_BETWEEN = "cpu:x86-64-v4"


def _targets(module: object) -> list[object]:
    left = {_BETWEEN} if getattr(module, "HEAVY", False) and TARGETS[-1] != _BETWEEN else set()
    return [pytest.param(t, marks=pytest.mark.slow) if t in left else t for t in TARGETS]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrizes `library` by the targets of its module, unless that has a library of its own."""
    if "library" in metafunc.fixturenames and not hasattr(metafunc.module, "library"):
        metafunc.parametrize("library", _targets(metafunc.module), indirect=True, scope="module")


@pytest.fixture(scope="module")
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The kernels of the module's `CASES`, compiled for one target."""
    cases = request.module.CASES
    return Library(
        list(cases.values()) if isinstance(cases, dict) else cases, request.param, tmp_path_factory.mktemp("kernels")
    )
