"""Targets: parsing, flags, what a GPU can store, and errors that list what is known."""

import re

import pytest

from planc.codegen import target
from planc.codegen.target import Target, check_dtypes, known, parse
from planc.errors import UsageError
from planc.plans.host import CPU_FLAGS, missing_flags


@pytest.mark.parametrize(
    "text",
    ["cpu:portable", "cpu:x86-64-v3", "cpu:x86-64-v3+avxvnni", "cpu:x86-64-v4", "cpu:x86-64-v4+bf16+vnni"],
)
def test_text_round_trips(text: str) -> None:
    assert str(parse(text)) == text


def test_features_are_a_sorted_set() -> None:
    assert parse("cpu:x86-64-v4+vnni+bf16+vnni") == Target("cpu", "x86-64-v4", ("bf16", "vnni"))


def test_flags_of_the_compiler() -> None:
    assert parse("cpu:x86-64-v4+vnni").flags == ("-march=x86-64-v4", "-mavx512vnni")
    assert parse("cpu:x86-64-v3+avxvnni").flags == ("-march=x86-64-v3", "-mavxvnni")
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
        ((*CPU_FLAGS["x86-64-v4"], *CPU_FLAGS["vnni"], *CPU_FLAGS["amx"]), "cpu:x86-64-v4+vnni"),
        ((*CPU_FLAGS["x86-64-v4"], *CPU_FLAGS["vnni"], *CPU_FLAGS["bf16"]), "cpu:x86-64-v4+bf16+vnni"),
        (CPU_FLAGS["x86-64-v4"], "cpu:x86-64-v4"),
        ((*CPU_FLAGS["x86-64-v3"], *CPU_FLAGS["vnni"]), "cpu:x86-64-v3"),
        ((*CPU_FLAGS["x86-64-v3"], "avx_vnni"), "cpu:x86-64-v3+avxvnni"),
        ((*CPU_FLAGS["x86-64-v4"], *CPU_FLAGS["vnni"], "avx_vnni"), "cpu:x86-64-v4+vnni"),
        (("avx_vnni",), "cpu:portable"),
    ],
)
def test_host_takes_the_best_level(monkeypatch, flags: tuple[str, ...], want: str) -> None:
    monkeypatch.setattr(target, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(target.platform, "machine", lambda: "x86_64")
    assert str(target.host()) == want


def test_other_machines_are_portable(monkeypatch) -> None:
    monkeypatch.setattr(target.platform, "machine", lambda: "aarch64")
    assert str(target.host()) == "cpu:portable"


@pytest.mark.parametrize("text", ["gpu", "", "cpu:x86-64-v5", "cpu:x86-64-v4+foo", "cuda", "cuda:cpu", "sm_75"])
def test_unknown_names_list_the_known(text: str) -> None:
    with pytest.raises(UsageError, match="known: cpu, cpu:portable, cpu:x86-64-v3"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("cpu:x86-64-v3+vnni", "+vnni builds on cpu:x86-64-v4, not on x86-64-v3"),
        ("cpu:x86-64-v3+avxvnni+bf16", "+bf16 builds on cpu:x86-64-v4, not on x86-64-v3"),
        ("cpu:x86-64-v4+avxvnni", "+avxvnni builds on cpu:x86-64-v3, not on x86-64-v4"),
        ("cpu:x86-64-v4+vnni+avxvnni", "+avxvnni builds on cpu:x86-64-v3, not on x86-64-v4"),
        ("cpu:portable+avxvnni", "+avxvnni builds on cpu:x86-64-v3, not on portable"),
    ],
)
def test_extras_need_their_level(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"target '{text}': {told}")):
        parse(text)


def test_known_targets_have_their_own_extras() -> None:
    assert known()[:4] == ("cpu", "cpu:portable", "cpu:x86-64-v3[+avxvnni]", "cpu:x86-64-v4[+vnni][+bf16][+amx]")


@pytest.mark.parametrize("text", ["h100-sxm", "cuda:h100-sxm"])
def test_a_gpu_by_name(text: str) -> None:
    found = parse(text)
    assert found == Target("cuda", "sm_90a", sku="h100-sxm")
    assert str(found) == "cuda:h100-sxm"
    assert found.sm.number == 90
    assert found.gpu is not None
    assert found.gpu.memory_gb == 80


@pytest.mark.parametrize("text", ["sm_120a", "cuda:sm_120a"])
def test_an_sm_by_name(text: str) -> None:
    found = parse(text)
    assert found == Target("cuda", "sm_120a")
    assert str(found) == "cuda:sm_120a"
    assert found.gpu is None


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("h100", "h100-sxm or h100-pcie or h100-nvl"),
        ("h100sxm", "h100-sxm"),
        ("sm_90", "sm_90a"),
        ("cuda:L40S", "l40s"),
        ("RTX 4090", "rtx-4090"),
    ],
)
def test_a_misspelt_name_gets_a_suggestion(text: str, meant: str) -> None:
    with pytest.raises(UsageError, match=rf"unknown target '{text}' \(did you mean {meant}\?\); known: cpu, "):
        parse(text)


def test_what_a_gpu_cannot_store() -> None:
    for possible in (("h100-sxm", "fp8"), ("a100-80g", "int8"), ("sm_80", "awq-g64"), ("cpu", "fp8"), ("cpu", "int4")):
        check_dtypes(parse(possible[0]), [possible[1], "f32"], "bf16")
    with pytest.raises(UsageError, match=r"--dtype fp8 needs .*sm_89 on.*a100-80g is sm_80. Take --dtype int8 .* l4, "):
        check_dtypes(parse("a100-80g"), ["bf16", "fp8"], "bf16")
    with pytest.raises(UsageError, match=r"--dtype int4-g64 .* for CPUs alone; cuda:h100-sxm .* take --dtype awq-g64$"):
        check_dtypes(parse("h100-sxm"), ["int4-g64"], "bf16")
    check_dtypes(parse("l4"), ["bf16"], "fp8")
    with pytest.raises(UsageError, match=r"--kv-cache-dtype fp8 needs .*sm_89 on.*; cuda:a10 is sm_86. .*int8"):
        check_dtypes(parse("a10"), ["bf16"], "fp8")
