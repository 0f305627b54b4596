"""What the machine offers: the cache folder follows the environment, CPUs follow the process's affinity."""

import os
from pathlib import Path

import pytest

from planc.plans.host import cache_dir, usable_cpus


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
