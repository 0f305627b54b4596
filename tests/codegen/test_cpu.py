"""The compiler driver: cache, determinism, what is left to rebuild by hand, and errors that name the command."""

import ctypes
import subprocess
import time
from pathlib import Path

import pytest

from planc.codegen import cpu
from planc.codegen.cpu import build_library, compiler
from planc.codegen.target import parse
from planc.errors import PlancError

PORTABLE = parse("cpu:portable")
SOURCES = {
    f"{name}.cpp": f'#include "planc/share.h"\nextern "C" int {name}() {{ return planc::share(8, 1, 2).begin; }}\n'
    for name in "ab"
}


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path / "cache"))


def build(folder: Path, sources: dict[str, str] | None = None) -> tuple[bytes, list[str]]:
    """Bytes of the library, and the names that were compiled."""
    compiled: list[str] = []
    path = build_library(sources or SOURCES, PORTABLE, folder, progress=lambda done, total, name: compiled.append(name))
    return path.read_bytes(), sorted(compiled)


def test_objects_are_cached_and_bytes_do_not_depend_on_it(tmp_path: Path) -> None:
    first, compiled = build(tmp_path / "one")
    again, hit = build(tmp_path / "two")
    assert (compiled, hit) == (["a", "b"], [])
    assert first == again
    for kept in (tmp_path / "cache/kernels").iterdir():
        kept.unlink()
    fresh, compiled = build(tmp_path / "elsewhere/three")
    assert (fresh, compiled) == (first, ["a", "b"])


def test_a_changed_source_or_header_misses(tmp_path: Path, monkeypatch) -> None:
    build(tmp_path / "one")
    _, compiled = build(tmp_path / "two", SOURCES | {"b.cpp": SOURCES["b.cpp"] + "// changed\n"})
    assert compiled == ["b"]
    (tmp_path / "include/planc").mkdir(parents=True)
    for header in (cpu.INCLUDE / "planc").iterdir():
        (tmp_path / "include/planc" / header.name).write_text(header.read_text() + "\n")
    monkeypatch.setattr(cpu, "INCLUDE", tmp_path / "include")
    assert build(tmp_path / "three")[1] == ["a", "b"]


def test_another_compiler_command_misses(tmp_path: Path, monkeypatch) -> None:
    """The command may hold flags of its own, such as -ffast-math."""
    build(tmp_path / "one")
    command = " ".join(compiler().command)
    monkeypatch.setenv("CXX", f"{command} -ffast-math")
    compiler.cache_clear()
    assert build(tmp_path / "two")[1] == ["a", "b"]
    monkeypatch.setenv("CXX", command)
    compiler.cache_clear()
    assert build(tmp_path / "three")[1] == []


def test_the_cache_is_for_its_owner_alone(tmp_path: Path) -> None:
    build(tmp_path / "one")
    for folder in ("cache", "cache/kernels"):
        assert (tmp_path / folder).stat().st_mode & 0o777 == 0o700


def test_an_interrupt_cancels_what_waits(tmp_path: Path, monkeypatch) -> None:
    started: list[str] = []

    def compile_(name: str, *rest: object) -> None:
        started.append(name)
        time.sleep(0.01)

    def interrupt(done: int, total: int, name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cpu, "_compile", compile_)
    sources = {f"k{i}.cpp": "" for i in range(200)}
    with pytest.raises(KeyboardInterrupt):
        build_library(sources, PORTABLE, tmp_path / "k", progress=interrupt)
    assert len(started) < 100


def test_the_folder_compiles_by_hand(tmp_path: Path) -> None:
    build(tmp_path / "kernels")
    command = [*compiler().command, *compiler().flags(PORTABLE), "-shared", "a.cpp", "b.cpp", "-o", "mine.so"]
    subprocess.run(command, cwd=tmp_path / "kernels", check=True)
    assert ctypes.CDLL(str(tmp_path / "kernels/mine.so")).a() == 4


def test_a_failed_compile_names_the_command_and_the_error(tmp_path: Path) -> None:
    with pytest.raises(PlancError, match=r"-std=c\+\+20 .* -c bad.cpp .*: error: .*nonsense"):
        build(tmp_path / "k", {"bad.cpp": "nonsense;\n"})
    assert not list((tmp_path / "cache/kernels").iterdir()), "nothing half-written stays in the cache"


def test_warnings_are_errors(tmp_path: Path) -> None:
    with pytest.raises(PlancError, match="unused"):
        build(tmp_path / "k", {"warn.cpp": "static int f() { int unused; return 1; }\nint g() { return f(); }\n"})


def test_a_missing_compiler_says_what_to_do() -> None:
    with pytest.raises(PlancError, match=r"no C\+\+ compiler: `no-such-compiler --version` failed .* set CXX"):
        compiler("no-such-compiler")


def test_cxx_chooses_the_compiler(monkeypatch) -> None:
    monkeypatch.setenv("CXX", "also-missing -m64")
    compiler.cache_clear()
    with pytest.raises(PlancError, match="`also-missing -m64 --version`"):
        compiler()


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(PlancError, match="set PLANC_CACHE_DIR"):
        build(tmp_path / "k")
