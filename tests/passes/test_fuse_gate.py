"""A product gates its halves itself if nothing else reads them, values stay, and the nodes can be had back."""

from pathlib import Path

import numpy as np
import pytest

from planc.codegen.target import parse as parse_target
from planc.compiler.ir.graph import Graph
from planc.compiler.ir.interp import run
from planc.compiler.ir.text import parse
from planc.compiler.ir.verify import verify
from planc.passes import pipeline
from planc.passes.fuse_gate import apart, fuse_gate
from planc.passes.options import Options
from tests.lifted import lifted
from tests.models import tiny

OPTIONS = Options(parse_target("cpu:portable"), "bf16", "bf16", 256, 4, 32, 16)
ON_A_GPU = Options(parse_target("h100-sxm"), "bf16", "bf16", 256, 4, 32, 16)
GATE = "%g: f32[T, 64]@strides:{0} = slice(%p, axis=1, start=0, stop=64)"
UP = "%u: f32[T, 64]@strides:{0} = slice(%p, axis=1, start=64, stop=128)"
ACT = "%y: f32[T, 64] = act_mul(%g, %u, act='silu')"


def graph(*lines: str, n: int = 128, outputs: str = "%y") -> Graph:
    head = f"""graph g(%x: f32[T, 8]) {{
  weight %w: f32[{n}, 8] = load(dtype='f32', name='w', shape=({n}, 8))
  %p: f32[T, {n}] = linear(%x, %w)
"""
    body = "".join(f"  {line.format(n)}\n" for line in lines)
    made = parse(head + body + f"  return {outputs}\n}}\n").without_dead()
    verify(made, "test")
    return made


def test_four_become_one_of_the_same_values() -> None:
    before = graph(GATE, UP, ACT)
    after, count = fuse_gate(before, OPTIONS)
    verify(after, "fuse_gate")
    assert ([n.op for n in after.nodes], count) == (["linear_act_mul"], 1)
    rng = np.random.default_rng(0)
    given, weights = {"x": rng.standard_normal((5, 8)).astype(np.float32)}, {"w": rng.standard_normal((128, 8))}
    weights = {name: w.astype(np.float32) for name, w in weights.items()}
    for name, want in run(before, given, weights).items():
        np.testing.assert_array_equal(run(after, given, weights)[name], want)
        np.testing.assert_array_equal(run(apart(after), given, weights)[name], want)
    verify(apart(after), "apart")
    assert fuse_gate(apart(after), OPTIONS) == (after, 1)


@pytest.mark.parametrize(
    "made",
    [
        graph(GATE, UP, ACT, outputs="%y, %p"),
        graph(GATE, UP, ACT, "%z: f32[T, 64] = neg(%g)", outputs="%y, %z"),
        graph(GATE, UP, "%y: f32[T, 64] = act_mul(%u, %g, act='silu')"),
        graph(GATE, "%y: f32[T, 64] = act_mul(%g, %g, act='silu')"),
        graph(GATE, "%u: f32[T, 64]@strides:128 = slice(%p, axis=1, start=32, stop=96)", ACT),
        graph(GATE, UP, ACT, n=192),
    ],
    ids=["the product is read", "a half is read", "the second half gates", "one half", "halves that meet", "thirds"],
)
def test_what_stays(made: Graph) -> None:
    assert fuse_gate(made, OPTIONS) == (made, 0)


def test_a_target_without_the_kernel_keeps_the_nodes() -> None:
    made = graph(GATE, UP, ACT)
    assert fuse_gate(made, ON_A_GPU) == (made, 0)
    narrow = graph(
        "%g: f32[T, 32]@strides:64 = slice(%p, axis=1, start=0, stop=32)",
        "%u: f32[T, 32]@strides:64 = slice(%p, axis=1, start=32, stop=64)",
        "%y: f32[T, 32] = act_mul(%g, %u, act='silu')",
        n=64,
    )
    assert fuse_gate(narrow, OPTIONS) == (narrow, 0)


@pytest.mark.parametrize("dtype", ["bf16", "int8", "awq-g32"])
def test_every_gate_of_a_model_is_fused(dtype: str, tmp_path: Path) -> None:
    options = Options(parse_target("cpu:portable"), dtype, "bf16", 256, 4, 32, 16)
    made, log = pipeline.run(lifted(tiny("llama", tmp_path, intermediate_size=128)).graph, options)
    layers = sum(n.op == "paged_attention" for n in made.nodes)
    assert next(row.matches for row in log if row.name == "fuse_gate") == layers
    assert not any(n.op.startswith("act_mul") for n in made.nodes)
