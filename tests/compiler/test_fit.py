"""Does a plan fit its GPU: what is too much is named, with the ranks and the dtype that would fit."""

import re
from dataclasses import replace

import pytest

from planc.codegen.target import parse
from planc.compiler.fit import check_fits
from planc.errors import PlancError
from planc.passes.options import Options

OPTIONS = Options(parse("h100-sxm"), "bf16", "bf16", 8192, 64, 2048, 16)
LLAMA_70B = 141_107_000_000  # bytes in bf16
SEQUENCE = 8192 * 327_680


def refusal(weights: int, options: Options = OPTIONS, arena: int = 10**9, sequence: int = SEQUENCE) -> str:
    with pytest.raises(PlancError) as e:
        check_fits(options.target, options, weights, arena, sequence)
    return str(e.value)


def test_what_fits_passes() -> None:
    check_fits(OPTIONS.target, OPTIONS, 68 * 10**9, 10**9, SEQUENCE)
    check_fits(parse("sm_90a"), OPTIONS, 10**13, 0, 0)
    check_fits(parse("cpu:portable"), OPTIONS, 10**13, 0, 0)


def test_what_is_too_much_is_counted_and_what_would_fit_is_named() -> None:
    told = refusal(LLAMA_70B)
    (over,) = re.findall(r"are ([\d.]+) GB more than the 72.0 GB", told)
    assert float(over) == pytest.approx((LLAMA_70B + 1e9 + SEQUENCE) / 1e9 - 72, abs=0.06)
    assert "--tp 4 or --dtype awq would fit" in told
    two = replace(OPTIONS, tp=2)
    assert "--tp 4 or --dtype fp8 or a smaller --max-model-len would fit" in refusal(
        LLAMA_70B // 2, two, sequence=SEQUENCE // 2
    )


def test_a_cache_that_is_too_large_asks_for_shorter_sequences() -> None:
    told = refusal(60 * 10**9, sequence=40 * 10**9)
    assert "a smaller --max-model-len" in told


def test_what_nothing_makes_fit() -> None:
    assert "take a GPU with more memory" in refusal(2 * 10**12)
