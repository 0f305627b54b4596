"""Tools of a target are looked for before any work."""

import pytest

from planc.codegen import cpu
from planc.codegen.cuda import toolchain
from planc.codegen.target import parse
from planc.compiler.backends import check_tools
from planc.compiler.build import BuildRequest, build
from planc.compiler.progress import Progress
from planc.errors import PlancError


@pytest.fixture(autouse=True)
def fresh() -> None:
    cpu.compiler.cache_clear()
    toolchain.toolchain.cache_clear()


def test_a_compiler_that_does_not_start_ends_the_build_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with Progress(quiet=True) as progress, pytest.raises(PlancError, match=r"no C\+\+ compiler: `/no/such/compiler"):
        build(BuildRequest(str(tmp_path / "no-model"), tmp_path / "plan"), progress)


def test_wheels_that_are_missing_are_named_with_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    check_tools(parse("sm_90a"))
    toolchain.toolchain.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PlancError, match=r"triton, which is not installed; .*planc\[build-cuda\]"):
        check_tools(parse("h100-sxm"))
