"""Leftover pointwise chains: which nodes join, that values stay, and that the limits of one loop hold."""

from itertools import pairwise

import numpy as np
import pytest

from planc.codegen.target import parse as parse_target
from planc.compiler.ir.graph import Graph
from planc.compiler.ir.interp import run
from planc.compiler.ir.text import parse
from planc.compiler.ir.verify import verify
from planc.passes.fuse_pointwise import fuse_pointwise
from planc.passes.memory import memory
from planc.passes.options import Options

OPTIONS = Options(parse_target("cpu:portable"), "f32", "f32", 256, 4, 32, 16)
HEAD = "graph g(%x: f32[T, 8], %y: f32[T, 8], %i: i32[T, 8]) {\n"


def graph(*lines: str, outputs: str = "%z") -> Graph:
    made = parse(HEAD + "".join(f"  {line}\n" for line in lines) + f"  return {outputs}\n}}\n")
    verify(made, "test")
    return made


def ops(g: Graph) -> list[str]:
    return [n.op for n in g.nodes]


def fused(g: Graph) -> Graph:
    """The fused graph; its outputs are those of the graph before."""
    after, _ = fuse_pointwise(g, OPTIONS)
    verify(after, "fuse_pointwise")
    rng = np.random.default_rng(0)
    given = {name: rng.standard_normal((5, 8)).astype(np.float32) for name in "xy"}
    given["i"] = rng.integers(0, 9, (5, 8)).astype(np.int32)
    for name, want in run(g, given, {}).items():
        np.testing.assert_array_equal(run(after, given, {})[name], want)
    return after


def test_a_chain_becomes_one_loop() -> None:
    after = fused(
        graph(
            "%a: f32[T, 8] = div(%x, scalar=30.0)",
            "%b: f32[T, 8] = tanh(%a)",
            "%c: f32[T, 8] = mul(%b, scalar=30.0)",
            "%d: f32[T, 8] = gt(%c, %y)",
            "%z: f32[T, 8] = where(%d, %c, %y)",
        )
    )
    assert ops(after) == ["fused"]
    assert after.nodes[0].inputs == ("x", "y")
    assert after.nodes[0].attr("code") == "div(i0,30.0);tanh(t0);mul(t1,30.0);gt(t2,i1);where(t3,t2,i1)"


def test_a_scalar_keeps_its_side() -> None:
    after = fused(graph("%a: f32[T, 8] = sub(%x, reversed=True, scalar=1.0)", "%z: f32[T, 8] = gelu(%a, tanh=True)"))
    assert after.nodes[0].attr("code") == "sub(1.0,i0);gelu_tanh(t0)"


def test_a_lone_node_stays() -> None:
    assert ops(fused(graph("%z: f32[T, 8] = add(%x, %y)"))) == ["add"]


def test_a_value_read_outside_ends_a_chain() -> None:
    a, b = "%a: f32[T, 8] = neg(%x)", "%b: f32[T, 8] = exp(%a)"
    after = fused(graph(a, b, "%s: f32[T, 8] = softmax(%a)", "%z: f32[T, 8] = add(%b, %s)"))
    assert ops(after) == ["neg", "softmax", "fused"]
    assert fused(graph(a, b, "%z: f32[T, 8] = add(%b, %y)", outputs="%z, %a")).nodes[0].op == "neg"


def test_shapes_and_integers_end_a_chain() -> None:
    after = fused(
        graph(
            "%m: f32[T, 1] = mean(%x)",
            "%e: f32[T, 1] = exp(%m)",
            "%n: f32[T, 1] = neg(%e)",
            "%j: i32[T, 8] = add(%i, scalar=1)",
            "%k: f32[T, 8] = gt(%j, scalar=3)",
            "%p: f32[T, 8] = mul(%k, %n)",
            "%z: f32[T, 8] = add(%p, %x)",
        )
    )
    assert ops(after) == ["mean", "fused", "add", "gt", "fused"]


def test_a_long_chain_is_cut() -> None:
    names = ["x", *(f"v{n}" for n in range(59)), "z"]
    after = fused(graph(*(f"%{b}: f32[T, 8] = neg(%{a})" for a, b in pairwise(names))))
    assert [str(n.attr("code")).count(";") + 1 for n in after.nodes] == [12, 24, 24]


def test_a_wide_tree_is_cut() -> None:
    leaves = [f"%s{n}: f32[T, 8] = softmax(%{'xy'[n % 2]})" for n in range(12)]
    total = [f"%t{n}: f32[T, 8] = add(%{'s0' if n == 1 else f't{n - 1}'}, %s{n})" for n in range(1, 12)]
    after = fused(graph(*leaves, *total, outputs="%t11"))
    assert all(len(n.inputs) <= 8 for n in after.nodes)
    assert ops(after).count("fused") == 2


def test_infinities_print_and_parse() -> None:
    after = fused(graph("%a: f32[T, 8] = maximum(%x, scalar=-1e999)", "%z: f32[T, 8] = minimum(%a, scalar=1e999)"))
    assert after.nodes[0].attr("code") == "maximum(i0,-inf);minimum(t0,inf)"


@pytest.mark.parametrize("first", ["x", "y"])
def test_the_loop_writes_over_an_input_that_dies(first: str) -> None:
    second = "y" if first == "x" else "x"
    g = graph(
        "%a: f32[T, 8] = softmax(%x)",
        "%m: f32[T, 1] = mean(%a)",
        f"%b: f32[T, 8] = sub(%{'m' if first == 'x' else 'a'}, %{'a' if first == 'x' else 'm'})",
        f"%z: f32[T, 8] = mul(%b, %{second})",
    )
    planned, _ = memory(fused(g), OPTIONS)
    addr = {v.name: v.addr for n in planned.nodes for v in n.outputs}
    assert addr["z"] == addr["a"]
