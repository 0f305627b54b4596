"""Fixtures of the kernel tests: in goes a module's list of cases, out comes its library for each target."""

import pytest

from tests.kernels.harness import TARGETS, Library


def _targets(module: object) -> list[object]:
    """A module that takes long to compile leaves targets to the nightly run, by its `NIGHTLY`: plain AVX-512 for one,
    which shares its code with the targets below and above it. The best of this machine stays.
    """
    left = {*getattr(module, "NIGHTLY", ())} - {TARGETS[-1]}
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
