"""What nodes have to do: bytes and operations, counted by hand."""

import pytest

from planc.codegen.work import Step, Work, first_weight, work
from planc.compiler.ir.graph import Node, Value
from planc.compiler.ir.types import Attr, TensorType

DECODE = Step(tokens=4, seqs=4, rows=4, context=100)
PREFILL = Step(tokens=100, seqs=1, rows=1, context=100)


def done(op: str, inputs: list[str], out: str, step: Step, **attrs: Attr) -> Work:
    types = {f"i{i}": tensor(t) for i, t in enumerate(inputs)}
    node = Node(op, tuple(types), (Value("y", tensor(out)),), tuple(attrs.items()))
    return work(node, types, step)


def tensor(text: str) -> TensorType:
    """`bf16[128, K]`."""
    dtype, _, shape = text.rstrip("]").partition("[")
    return TensorType(dtype, tuple(int(d) if d.isdigit() else d for d in shape.split(", ")))


def test_a_product_reads_its_weight_once_and_multiplies_every_row() -> None:
    found = done("linear", ["f32[T, 64]", "bf16[128, 64]"], "f32[T, 128]", DECODE)
    assert found == Work(4 * 64 * 4 + 128 * 64 * 2 + 4 * 128 * 4, 2 * 4 * 128 * 64, "bf16")


def test_codes_are_multiplied_as_what_rows_are() -> None:
    rows = ["i8[T, 64]", "f32[T]", "i8[128, 64]", "f32[128]"]
    assert done("qlinear", rows, "f32[T, 128]", DECODE, scheme="int8").dtype == "i8"
    assert done("qlinear", ["f32[T, 64]", *rows[2:]], "f32[T, 128]", DECODE, scheme="int8-wo").dtype == "bf16"


def test_experts_that_no_token_meets_are_not_read() -> None:
    inputs = ["f32[T, 64]", "i32[T, 2]", "bf16[32, 128, 64]"]
    few = done("expert_linear", inputs, "f32[T, 2, 128]", DECODE)
    many = done("expert_linear", inputs, "f32[T, 2, 128]", PREFILL)
    matrix = 128 * 64 * 2
    assert few.nbytes == 4 * 64 * 4 + 8 * 4 + 8 * matrix + 8 * 128 * 4
    assert few.operations == 2 * 8 * 128 * 64
    assert many.nbytes == 100 * 64 * 4 + 200 * 4 + 32 * matrix + 200 * 128 * 4


@pytest.mark.parametrize(("window", "seen", "pages"), [(0, 100, 7), (32, 32, 2)])
def test_attention_reads_the_pages_that_it_looks_at(window: int, seen: int, pages: int) -> None:
    attrs = {"heads": 2, "k_dim": 8, "v_dim": 8, "block": 16, "dtype": "bf16", "window": window}
    found = done("paged_attention", ["f32[T, 6, 8]"], "f32[T, 6, 8]", DECODE, **attrs)
    assert found.nbytes == 2 * 4 * 48 * 4 + 4 * pages * 16 * 2 * 16 * 2
    assert found.operations == 2 * 4 * 6 * 16 * seen
    scaled = {**attrs, "dtype": "i8", "k_scale_offset": 64}
    narrow = done("paged_attention", ["f32[T, 6, 8]"], "f32[T, 6, 8]", DECODE, **scaled)
    assert narrow.nbytes == 2 * 4 * 48 * 4 + 4 * pages * 16 * 2 * (16 + 8)


@pytest.mark.parametrize("window", [0, 1, 32, 99, 100, 200])
@pytest.mark.parametrize("step", [PREFILL, Step(tokens=60, seqs=2, rows=2, context=80)], ids=["whole", "chunks"])
def test_a_prompts_tokens_look_at_what_is_before_them(window: int, step: Step) -> None:
    attrs = {"heads": 2, "k_dim": 8, "v_dim": 8, "block": 16, "dtype": "bf16", "window": window}
    found = done("paged_attention", ["f32[T, 6, 8]"], "f32[T, 6, 8]", step, **attrs)
    own = step.tokens // step.seqs
    seen = sum(min(p, window or p) for p in range(step.context - own + 1, step.context + 1))
    assert found.operations == 2 * step.seqs * seen * 6 * 16
    pages = -(-min(step.context, (window or step.context) + own - 1) // 16)
    assert found.nbytes == 2 * step.tokens * 48 * 4 + step.seqs * pages * 16 * 2 * 16 * 2


def test_of_tables_the_rows_that_are_asked_for_count() -> None:
    assert done("embedding", ["bf16[50000, 64]", "i32[T]"], "f32[T, 64]", DECODE).nbytes == 2 * 4 * 64 * 4
    tables = ["f32[T, 2, 64]", "f32[8192, 32]", "f32[8192, 32]", "i32[T]"]
    assert done("rotary", tables, "f32[T, 2, 64]", DECODE).nbytes == 2 * 4 * 128 * 4 + 2 * 4 * 32 * 4
    both = ["f32[T, 2, 64]", "f32[T, 1, 64]", "f32[T, 1, 16]", *tables[1:], "i32[T]", "u8[P, 512]"]
    assert done("rotary_append", both, "f32[T, 2, 64]", DECODE).nbytes == 2 * 4 * (128 + 64 + 16) * 4 + 2 * 4 * 32 * 4


@pytest.mark.parametrize(
    ("op", "scheme", "at"),
    [
        ("linear", "", 1),
        ("qlinear", "int8", 2),
        ("qlinear", "awq-g32", 1),
        ("expert_linear", "", 2),
        ("qexpert_linear", "fp8", 3),
    ],
)
def test_where_the_weight_is(op: str, scheme: str, at: int) -> None:
    assert first_weight(Node(op, (), (), (("scheme", scheme),) if scheme else ())) == at
