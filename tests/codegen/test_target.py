"""Targets: parsing, flags, and errors that list what is known."""

import pytest

from planc.codegen import target
from planc.codegen.target import Target, parse
from planc.errors import UsageError
from planc.plans.host import CPU_FLAGS, missing_flags


@pytest.mark.parametrize("text", ["cpu:portable", "cpu:x86-64-v3", "cpu:x86-64-v4", "cpu:x86-64-v4+bf16+vnni"])
def test_text_round_trips(text: str) -> None:
    assert str(parse(text)) == text


def test_features_are_a_sorted_set() -> None:
    assert parse("cpu:x86-64-v4+vnni+bf16+vnni") == Target("cpu", "x86-64-v4", ("bf16", "vnni"))


def test_flags_of_the_compiler() -> None:
    assert parse("cpu:x86-64-v4+vnni").flags == ("-march=x86-64-v4", "-mavx512vnni")
    assert not any("march" in f for f in parse("cpu:portable").flags)


def test_cpu_alone_is_this_machine() -> None:
    found = parse("cpu")
    assert found == target.host()
    assert not missing_flags(str(found))


@pytest.mark.parametrize(
    ("flags", "want"),
    [
        ((), "cpu:portable"),
        (CPU_FLAGS["x86-64-v3"], "cpu:x86-64-v3"),
        ((*CPU_FLAGS["x86-64-v4"], *CPU_FLAGS["vnni"], *CPU_FLAGS["amx"]), "cpu:x86-64-v4"),
        ((*CPU_FLAGS["x86-64-v3"], *CPU_FLAGS["vnni"]), "cpu:x86-64-v3"),
    ],
)
def test_host_takes_the_best_level(monkeypatch, flags: tuple[str, ...], want: str) -> None:
    monkeypatch.setattr(target, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(target.platform, "machine", lambda: "x86_64")
    assert str(target.host()) == want


def test_other_machines_are_portable(monkeypatch) -> None:
    monkeypatch.setattr(target.platform, "machine", lambda: "aarch64")
    assert str(target.host()) == "cpu:portable"


@pytest.mark.parametrize("text", ["gpu", "", "cpu:x86-64-v5", "cpu:x86-64-v4+foo", "cuda:sm_90a"])
def test_unknown_names_list_the_known(text: str) -> None:
    with pytest.raises(UsageError, match="known: cpu, cpu:portable, cpu:x86-64-v3"):
        parse(text)


def test_extras_need_their_level() -> None:
    with pytest.raises(UsageError, match=r"\+vnni builds on cpu:x86-64-v4"):
        parse("cpu:x86-64-v3+vnni")
