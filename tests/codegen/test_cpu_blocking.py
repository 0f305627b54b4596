"""Blockings: what a tuning file may say of a CPU's products, and what is worth measuring of them."""

import pytest

from planc.codegen.cpu_blocking import blockings_for, variants
from planc.codegen.target import parse
from planc.errors import UsageError
from planc.plans.tuning import Blocking, CpuEntry, CpuProduct, Tuning

TARGET = parse("cpu:x86-64-v4+bf16+vnni")
BF16 = CpuProduct("linear", "bf16", 3072, 576)
CODES = CpuProduct("qlinear", "int8-wo", 3072, 576)


def tuning(product: CpuProduct, blocking: Blocking, target: str = str(TARGET)) -> Tuning:
    return Tuning(cpu_entries=(CpuEntry(target, product, blocking, 0.9),))


def test_entries_of_the_target_are_taken() -> None:
    blocking = Blocking(96, 8, 256, 4)
    assert blockings_for(TARGET, tuning(BF16, blocking)) == {BF16: blocking}
    assert blockings_for(TARGET, tuning(BF16, Blocking(tile_rows=99), "cpu:portable")) == {}
    assert blockings_for(TARGET, None) == {}


@pytest.mark.parametrize(
    ("product", "blocking", "told"),
    [
        (
            BF16,
            Blocking(tile_rows=7),
            r"linear by bf16 \[3072, 576\] on cpu:x86-64-v4\+bf16\+vnni with tile_rows 7: .*6, ",
        ),
        (BF16, Blocking(chunk_rows=0), "chunk_rows must be from 1 to 4096, not 0"),
        (BF16, Blocking(panel_k=4096), "panel_k must be from 128 to 2048, not 4096"),
        (BF16, Blocking(panel_k=200), "panel_k must be a multiple of 128, not 200"),
        (CODES, Blocking(panel_k=256), "panel_k of this weight is not free: its k are summed by panels"),
        (CpuProduct("linear", "int9", 8, 8), Blocking(), "names no product; planc tune writes them"),
        (CpuProduct("softmax", "bf16", 8, 8), Blocking(), "names no product"),
    ],
)
def test_an_entry_that_may_not_be_used_is_named(product: CpuProduct, blocking: Blocking, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        blockings_for(TARGET, tuning(product, blocking))


def test_what_is_worth_measuring_may_be_used_and_is_no_twice() -> None:
    for product in (BF16, CODES, CpuProduct("qexpert_linear", "awq", 64, 4096, 8)):
        found = variants(product)
        assert found[0] == Blocking()
        assert len(set(found)) == len(found)
        for blocking in found:
            blockings_for(TARGET, tuning(product, blocking))
    assert not any(b.panel_k for b in variants(CODES))
    assert [b.panel_k for b in variants(BF16) if b.panel_k] == [256, 512, 1024], "2048 would be one panel, as 1024 is"
