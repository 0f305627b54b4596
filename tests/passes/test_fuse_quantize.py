"""Rows are rounded where they are made if nothing else reads them, values stay, and the two ops can be had back."""

import numpy as np
import pytest

from planc.codegen.target import parse as parse_target
from planc.compiler.ir.graph import Graph
from planc.compiler.ir.interp import run
from planc.compiler.ir.text import parse, to_text
from planc.compiler.ir.verify import verify
from planc.passes import pipeline
from planc.passes.fuse_quantize import apart, fuse_quantize
from planc.passes.options import Options
from tests.lifted import lifted
from tests.models import tiny

OPTIONS = Options(parse_target("cpu:portable"), "int8", "bf16", 256, 4, 32, 16)
HEAD = """graph g(%x: f32[T, 8], %y: f32[T, 8]) {
  weight %w: f32[8] = load(dtype='f32', name='w', shape=(8,))
  weight %shift: f32[8] = load(dtype='f32', name='shift', shape=(8,))
  weight %kept: i32[3] = load(dtype='i32', name='kept', shape=(3,))
"""
NORM = "%n: f32[T, 8] = rms_norm(%x, %w, eps=1e-05)"
SUM = "%n: f32[T, 8], %sum: f32[T, 8] = add_layer_norm(%x, %y, eps=1e-05)"
ACT = "%n: f32[T, 8] = act_mul(%x, %y, act='silu')"
I8 = "%n.i8: i8[T, 8], %n.i8.s: f32[T] = quantize_rows(%n, dtype='i8')"
TURNED = "%n.i8.h8: i8[T, 8], %n.i8.h8.s: f32[T] = quantize_rows(%n, dtype='i8', hadamard=8)"
SHIFTED = "%n.i8.shift: i8[T, 8], %n.i8.shift.s: f32[T] = quantize_rows(%n, %shift, dtype='i8')"
KEPT = "%q: f8e4m3[T, 14], %s: f32[T] = quantize_rows(%n, %shift, %kept, dtype='f8e4m3')"


def graph(*lines: str, outputs: str) -> Graph:
    made = parse(HEAD + "".join(f"  {line}\n" for line in lines) + f"  return {outputs}\n}}\n").without_dead()
    verify(made, "test")
    return made


def ops(g: Graph) -> list[str]:
    return [n.op for n in g.nodes]


@pytest.mark.parametrize(
    ("first", "second", "outputs", "wanted"),
    [
        (NORM, I8, "%n.i8, %n.i8.s", "rms_norm_quantize"),
        (NORM, SHIFTED, "%n.i8.shift, %n.i8.shift.s", "rms_norm_quantize"),
        (SUM, TURNED, "%n.i8.h8, %n.i8.h8.s, %sum", "add_layer_norm_quantize"),
        (SUM, KEPT, "%q, %s, %sum", "add_layer_norm_quantize"),
        (ACT, KEPT, "%q, %s", "act_mul_quantize"),
    ],
)
def test_two_become_one_of_the_same_values(first: str, second: str, outputs: str, wanted: str) -> None:
    before = graph(first, second, outputs=outputs)
    after, count = fuse_quantize(before, OPTIONS)
    verify(after, "fuse_quantize")
    assert (ops(after), count) == ([wanted], 1)
    rng = np.random.default_rng(0)
    given = {name: rng.standard_normal((5, 8)).astype(np.float32) for name in "xy"}
    weights = {name: rng.standard_normal(8).astype(np.float32) for name in ("w", "shift")}
    weights["kept"] = np.array([0, 3, 7], np.int32)
    for name, want in run(before, given, weights).items():
        np.testing.assert_array_equal(run(after, given, weights)[name], want)
    if "%q" not in outputs:  # a name that says nothing of the rows
        assert to_text(apart(after)) == to_text(before)
    assert fuse_quantize(apart(after), OPTIONS) == (after, 1)


@pytest.mark.parametrize(
    "lines",
    [
        (NORM, I8, "%z: f32[T, 8] = neg(%n)"),
        (SUM, "%z: i8[T, 8], %n.i8.s: f32[T] = quantize_rows(%sum, dtype='i8')"),
        (NORM, I8, "%z: i8[T, 8], %z.s: f32[T] = quantize_rows(%n, dtype='i8', hadamard=2)"),
        ("%n: f32[T, 8] = neg(%x)", I8, "%z: i8[T, 8] = copy(%n.i8)"),
    ],
)
def test_rows_that_others_read_or_make_stay(lines: tuple[str, ...]) -> None:
    before = graph(*lines, outputs="%z, %n.i8.s")
    assert fuse_quantize(before, OPTIONS) == (before, 0)


def test_rows_that_are_an_output_stay() -> None:
    before = graph(NORM, I8, outputs="%n, %n.i8")
    assert fuse_quantize(before, OPTIONS) == (before, 0)


def test_rows_without_a_kernel_for_both_stay() -> None:
    text = to_text(graph(ACT, I8, outputs="%n.i8, %n.i8.s")).replace("8]", "65544]")
    wide = parse(text)
    verify(wide, "test")
    assert fuse_quantize(wide, OPTIONS) == (wide, 0)


def test_a_layer_has_one_rounding_left(tmp_path) -> None:
    model = lifted(tiny("llama", tmp_path))
    graph, log = pipeline.run(model.graph, OPTIONS)
    found = [n.op for n in graph.nodes if "quantize" in n.op]
    layer = ["quantize_rows", "add_rms_norm_quantize", "act_mul_quantize", "add_rms_norm_quantize"]
    assert found == ["rms_norm_quantize", *layer, *layer[:3]]
    assert [p.matches for p in log if p.name == "fuse_quantize"] == [6]
