"""What the machine offers: the cache folder follows the environment, CPUs follow the process's affinity."""

import os
from pathlib import Path

import pytest

from planc.plans import host
from planc.plans.host import cache_dir, usable_cores, usable_cpus


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANC_CACHE_DIR", "/own")
    assert cache_dir() == Path("/own")
    monkeypatch.delenv("PLANC_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/x/planc")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert cache_dir() == Path("/h/.cache/planc")


def test_usable_cpus_follow_the_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 9}, raising=False)
    assert usable_cpus() == 3


def test_usable_cores_count_a_core_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for cpu, siblings in ((0, "0,4"), (4, "0,4"), (1, "1,5")):
        folder = tmp_path / f"cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    monkeypatch.setattr(host, "CPU_TOPOLOGY", tmp_path)
    monkeypatch.setattr(host, "CPU_QUOTA", tmp_path / "none")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 4, 9}, raising=False)
    assert usable_cpus() == 4
    assert usable_cores() == 3  # nothing is known of CPU 9
    (tmp_path / "max").write_text("200000 100000")
    monkeypatch.setattr(host, "CPU_QUOTA", tmp_path / "max")
    assert usable_cores() == 2
