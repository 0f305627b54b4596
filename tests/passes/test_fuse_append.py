"""Keys turn on their way to the cache where only the cache reads them, and the three nodes can be had back."""

import numpy as np
import pytest

from planc.codegen.target import parse
from planc.compiler.ir.graph import Graph
from planc.compiler.ir.ops import OPS
from planc.compiler.ir.text import parse as parse_graph
from planc.compiler.ir.verify import verify
from planc.passes.fuse_append import apart, fuse_append
from planc.passes.options import Options
from tests.kernels.paged import Shape, empty_cache

SHAPE = Shape(4, 2, 16, 24, pad=0)
KV = ", ".join(f"{k}={v!r}" for k, v in SHAPE.cache.items())
MASK = "kind='causal', scale=0.25, softcap=0.0, window=0"
OPTIONS = Options(parse("cpu:portable"), "bf16", "f32", 256, 8, 64, 16)
INPUTS = "%q: f32[T, 4, 16], %k: f32[T, 2, 16], %v: f32[T, 2, 24], %positions: i32[T], %slots: i32[T]"
INPUTS += f", %kv: u8[P, {SHAPE.cache['page_bytes']}], %page_table: i32[S, M], %query_start: i32[S1]"
READS = "%kv, %page_table, %query_start, %positions"
TEXT = f"""
graph toy({INPUTS}) {{
  weight %cos: f32[50, 8] = load(dtype='f32', name='cos', shape=(50, 8))
  weight %sin: f32[50, 8] = load(dtype='f32', name='sin', shape=(50, 8))
  weight %other: f32[50, 8] = load(dtype='f32', name='other', shape=(50, 8))
  %turned: f32[T, 4, 16] = rotary(%q, %cos, %sin, %positions, interleaved=False)
  %keys: f32[T, 2, 16] = rotary(%k, %cos, %sin, %positions, interleaved=False)
  kv_append(%keys, %v, %slots, %kv, {KV})
  %y: f32[T, 4, 24] = paged_attention(%turned, {READS}, {KV}, {MASK})
  return %y
}}
"""


def graph_of(text: str) -> Graph:
    graph = parse_graph(text)
    verify(graph, "test")
    return graph


def ops(graph: Graph) -> list[str]:
    return [n.op for n in graph.nodes]


def test_both_rotations_and_the_write_are_one() -> None:
    fused, count = fuse_append(graph_of(TEXT), OPTIONS)
    verify(fused, "fuse_append")
    assert (count, ops(fused)) == (1, ["rotary_append", "paged_attention"])
    again = apart(fused)
    verify(again, "apart")
    assert ops(again) == ["rotary", "rotary", "kv_append", "paged_attention"]
    assert fuse_append(again, OPTIONS)[0] == fused


@pytest.mark.parametrize(
    "change",
    [
        ("%keys: f32[T, 2, 16] = rotary(%k, %cos, %sin", "%keys: f32[T, 2, 16] = rotary(%k, %other, %sin"),
        ("%k, %cos, %sin, %positions, interleaved=False", "%k, %cos, %sin, %positions, interleaved=True"),
        ("paged_attention(%turned", "paged_attention(%q"),
        ("kv_append(%keys", "kv_append(%k"),
        ("  kv_append(", "  %early: f32[T, 4, 16] = neg(%turned)\n  kv_append("),
        ("  return %y", "  %late: f32[T, 2, 16] = neg(%keys)\n  return %y, %late"),
    ],
)
def test_what_is_read_elsewhere_or_turns_otherwise_stays(change: tuple[str, str]) -> None:
    text = TEXT.replace(*change)
    assert text != TEXT
    if "%early" in text:
        text = text.replace("return %y", "return %y, %early")
    graph = graph_of(text)
    assert fuse_append(graph, OPTIONS) == (graph.without_dead(), 0)


def test_the_reference_is_that_of_the_three() -> None:
    rng = np.random.default_rng()
    q, k, v = (rng.standard_normal((5, h, d)).astype(np.float32) for h, d in ((4, 16), (2, 16), (2, 24)))
    angles = [rng.standard_normal((50, 5)).astype(np.float32) for _ in range(2)]
    positions, slots = np.arange(30, 35, dtype=np.int32), np.array([3, 17, 18, 40, 5], np.int32)
    for interleaved in (False, True):
        own = {"interleaved": interleaved}
        want, got = empty_cache(SHAPE, 3), empty_cache(SHAPE, 3)
        (turned,), (keys,) = (OPS["rotary"].ref(own, [x, *angles, positions], []) for x in (q, k))
        OPS["kv_append"].ref(SHAPE.cache, [keys, v, slots, want], [])
        (made,) = OPS["rotary_append"].ref(own | SHAPE.cache, [q, k, v, *angles, positions, slots, got], [])
        np.testing.assert_array_equal(made, turned)
        np.testing.assert_array_equal(got, want)
