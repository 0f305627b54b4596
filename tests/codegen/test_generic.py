"""A whole step of the generic ops: routing, experts, views of one column, values without tokens, through every pass."""

import ctypes
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planc.codegen import cpu
from planc.codegen.program import program
from planc.codegen.target import host
from planc.compiler.ir.graph import Graph
from planc.compiler.ir.interp import run, weights_of
from planc.compiler.ir.text import parse as parse_graph
from planc.compiler.ir.verify import verify
from planc.passes import pipeline
from planc.passes.assign import assign
from planc.passes.dedupe import dedupe
from planc.passes.fuse_act import fuse_act
from planc.passes.fuse_pointwise import fuse_pointwise
from planc.passes.memory import arena_bytes, memory
from planc.passes.merge_linear import merge_linear
from planc.passes.options import Options
from planc.passes.quantize import quantize
from planc.passes.select import select
from tests.codegen.test_program import Batch
from tests.kernels.harness import Buffer, assert_close, assert_same_bits, random

SHAPES = {"table": (50, 16), "router": (4, 16), "up": (4, 40, 16), "down": (4, 16, 20), "gate": (1, 16),
          "gate2": (1, 16), "head": (50, 19), "consts": (1, 9)}  # fmt: skip
WEIGHTS = "".join(
    f"  weight %{n}: f32[{', '.join(map(str, s))}] = load(dtype='f32', name='{n}', shape={s})\n"
    for n, s in SHAPES.items()
)
INPUTS = "%ids: i32[T], %positions: i32[T], %slots: i32[T], %page_table: i32[S, M], %query_start: i32[S1]"
TEXT = f"""
graph generic({INPUTS}, %logit_rows: i32[R], %kv: u8[P, 64]) {{
{WEIGHTS}  %h: f32[T, 16] = embedding(%table, %ids)
  %scores: f32[T, 4] = linear(%h, %router)
  %p: f32[T, 4] = softmax(%scores)
  %best: f32[T, 2], %which: i32[T, 2] = topk(%p, k=2, largest=True)
  %total: f32[T, 1] = sum(%best)
  %share: f32[T, 2] = div(%best, %total)
  %up_gate: f32[T, 2, 40] = expert_linear(%h, %which, %up)
  %g: f32[T, 2, 20]@strides:80,40 = slice(%up_gate, axis=2, start=0, stop=20)
  %u: f32[T, 2, 20]@strides:80,40 = slice(%up_gate, axis=2, start=20, stop=40)
  %act: f32[T, 2, 20] = silu(%g)
  %gated: f32[T, 2, 20] = mul(%act, %u)
  %out: f32[T, 2, 16] = expert_linear(%gated, %which, %down)
  %mixed: f32[T, 16] = weighted_sum(%out, %share)
  %one: f32[T, 1] = linear(%h, %gate)
  %two: f32[T, 1] = linear(%h, %gate2)
  %column: f32[T] = reshape(%two, shape=(-1,))
  %open: f32[T] = sigmoid(%column)
  %back: f32[T, 1] = reshape(%open, shape=(-1, 1))
  %sum: f32[T, 1] = add(%back, %one)
  %scaled: f32[T, 16] = mul(%mixed, %sum)
  %soft: f32[T, 16] = tanh(%scaled)
  %res: f32[T, 16] = add(%soft, %h)
  %top: f32[1, 3], %at: i32[1, 3] = topk(%consts, k=3, largest=False)
  %tall: f32[3, 1] = transpose(%top, perm=(1, 0))
  %flat: f32[1, 3] = reshape(%tall, shape=(1, 3))
  %wide: f32[T, 3] = expand(%flat, rows='T', shape=(-1, 3))
  %placed: f32[T, 3] = scatter(%wide, %which, %share, add=True)
  %picked: f32[T, 3] = gather(%res, %at)
  %extra: f32[T, 3] = add(%placed, %picked)
  %joined: f32[T, 19] = concat(%res, %extra, axis=1)
  %last: f32[R, 19] = take_rows(%joined, %logit_rows)
  %logits: f32[R, 50] = linear(%last, %head)
  return %logits
}}
"""
PASSES = tuple(
    pipeline.Pass(p) for p in (dedupe, assign, merge_linear, fuse_act, fuse_pointwise, quantize, select, memory)
)
TENSORS = {n: random(*s, seed=i, scale=0.5) for i, (n, s) in enumerate(SHAPES.items())}
TARGET = replace(host(), features=())  # what rounds nothing but its results


def options(dtype: str) -> Options:
    return Options(TARGET, dtype, "f32", 256, 4, 32, 16)


def planned(dtype: str) -> Graph:
    return pipeline.run(parse_graph(TEXT), options(dtype), pipeline=PASSES)[0]


class Step:
    """The library of a planned graph over its weights."""

    def __init__(self, graph: Graph, dtype: str, folder: Path, threads: int) -> None:
        dims = options(dtype).dims
        made = program(graph, TARGET, dims)
        self.lib = ctypes.CDLL(str(cpu.build(made, folder)))
        self.lib.planc_open.restype = ctypes.c_void_p
        evaluated = weights_of(graph, TENSORS.__getitem__, graph.constants)
        self.weights = [np.ascontiguousarray(evaluated[n]) for n in made.weights]
        self.arena = Buffer(arena_bytes(graph, dims))
        pointers = (ctypes.c_void_p * len(self.weights))(*(w.ctypes.data for w in self.weights))
        arena = ctypes.c_void_p(self.arena.data.ctypes.data)
        self.handle = ctypes.c_void_p(self.lib.planc_open(pointers, len(self.weights), arena, arena, threads))
        self.offset = made.logits_offset

    def __call__(self, given: dict[str, np.ndarray]) -> np.ndarray:
        rows = len(given["logit_rows"])
        names = ("ids", "positions", "slots", "page_table", "query_start", "logit_rows")
        batch = Batch(len(given["ids"]), 1, rows, 1, *(given[n].ctypes.data for n in names))
        assert self.lib.planc_step(self.handle, ctypes.byref(batch)) == 0
        self.arena.check("arena")
        return self.arena.data[self.offset : self.offset + rows * 200].view(np.float32).reshape(rows, 50).copy()


def inputs(tokens: int, rows: list[int]) -> dict[str, np.ndarray]:
    ids = np.arange(tokens) * 7 % 50
    made = {"ids": ids, "positions": ids, "slots": ids, "page_table": np.zeros((1, 1)), "query_start": [0, tokens]}
    return {k: np.ascontiguousarray(v, np.int32) for k, v in (made | {"logit_rows": rows}).items()}


@pytest.mark.parametrize(
    ("dtype", "bound"), [("f32", 3e-6), pytest.param("bf16", 0.03, marks=pytest.mark.slow), ("int8-wo", 0.05)]
)
def test_a_step_follows_the_graph_as_it_was_written(dtype: str, bound: float, tmp_path: Path) -> None:
    graph = planned(dtype)
    given = inputs(32, [0, 5, 31])
    want = run(parse_graph(TEXT), given, TENSORS)["logits"]
    stored = weights_of(graph, TENSORS.__getitem__, graph.constants)
    assert_close(run(graph, given, stored)["logits"], want, bound, "interpreter")
    whole = {}
    for threads in (1, 3):
        step = Step(graph, dtype, tmp_path, threads)
        whole[threads] = step(given)
        assert_close(whole[threads], run(graph, given, stored)["logits"], 3e-6, "library")
        assert_same_bits(step(inputs(6, [5])), whole[threads][1:2], "fewer tokens")
    assert_same_bits(whole[1], whole[3])


def test_the_passes_do_what_they_say() -> None:
    graph = planned("int8-wo")
    ops = [n.op for n in graph.nodes]
    verify(graph, "planned")
    assert ops.count("qexpert_linear") == 2
    assert "expert_linear" not in ops
    assert graph.types["up.q"].layout == "n64u4"
    assert graph.types["up.s"].shape == (4, 40)
    assert ops.count("fused") == 1
    assert ops.count("copy") == 1, "the one column of a merged layer becomes dense before it is a vector"
    addr = {v.name: v.addr for n in graph.nodes for v in n.outputs}
    assert addr["best"] != addr["which"]
