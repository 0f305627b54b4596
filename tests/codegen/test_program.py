"""A whole step through the C interface: a small model against the interpreter, its limits, its threads at rest."""

import ctypes
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planc.codegen import cpu
from planc.codegen.program import program
from planc.codegen.target import parse
from planc.compiler.ir.graph import Graph, Value, Weight
from planc.compiler.ir.interp import run
from planc.compiler.ir.packing import pack
from planc.compiler.ir.recipe import load
from planc.compiler.ir.text import parse as parse_graph
from planc.errors import PlancError
from tests.kernels.harness import Buffer, random
from tests.kernels.paged import Shape, empty_cache, page_table, slots

PORTABLE = parse("cpu:portable")
LIMITS = {"T": 8, "S": 3, "R": 3}
SHAPE = Shape(2, 1, 4, 4, pad=0)
KV = ", ".join(f"{k}={v!r}" for k, v in SHAPE.cache.items())
PAGE = SHAPE.cache["page_bytes"]
INPUTS = "%ids: i32[T], %positions: i32[T], %slots: i32[T], %page_table: i32[S, M], %query_start: i32[S1]"
INPUTS += f", %logit_rows: i32[R], %kv: u8[P, {PAGE}]"
READS = "%qh, %kv, %page_table, %query_start, %positions"
MASK = "kind='causal', scale=0.5, softcap=0.0, window=0"
TEXT = f"""
graph tiny({INPUTS}) {{
  weight %table: f32[50, 8]@n64 = pack(load(dtype='f32', name='table', shape=(50, 8)), layout='n64')
  weight %qkv: f32[16, 8]@n64 = pack(load(dtype='f32', name='qkv', shape=(16, 8)), layout='n64')
  weight %norm: f32[8] = load(dtype='f32', name='norm', shape=(8,))
  %x: f32[T, 8] at 0x0 = embedding(%table, %ids)  # model.embed
  %fused: f32[T, 16] at 0x100 = linear(%x, %qkv)  # model.qkv
  %q: f32[T, 8]@strides:16 at 0x100 = slice(%fused, axis=1, start=0, stop=8)
  %k: f32[T, 4]@strides:16 at 0x120 = slice(%fused, axis=1, start=8, stop=12)
  %v: f32[T, 4]@strides:16 at 0x130 = slice(%fused, axis=1, start=12, stop=16)
  %qh: f32[T, 2, 4]@strides:16,4 at 0x100 = reshape(%q, shape=(-1, 2, 4))
  %kh: f32[T, 1, 4]@strides:16,4 at 0x120 = reshape(%k, shape=(-1, 1, 4))
  %vh: f32[T, 1, 4]@strides:16,4 at 0x130 = reshape(%v, shape=(-1, 1, 4))
  kv_append(%kh, %vh, %slots, %kv, {KV})
  %a: f32[T, 2, 4] at 0x300 = paged_attention({READS}, {KV}, {MASK})
  %flat: f32[T, 8] at 0x300 = reshape(%a, shape=(-1, 8))
  %n: f32[T, 8] at 0x400, %sum: f32[T, 8] at 0x500 = add_rms_norm(%x, %flat, %norm, eps=1e-05)  # model.norm
  %last: f32[R, 8] at 0x600 = take_rows(%n, %logit_rows)
  %logits: f32[R, 50] at 0x700 = linear(%last, %table)  # lm_head
  return %logits
}}
"""
ARENA = 0x700 + 4 * 3 * 50


class Batch(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int32) for n in ("num_tokens", "num_seqs", "num_rows", "table_stride")] + [
        (n, ctypes.c_void_p) for n in ("ids", "positions", "slots", "page_table", "query_start", "logit_rows")
    ]


class Model:
    """The library of the tiny graph, its weights, an arena between guards and a cache."""

    def __init__(self, folder: Path, threads: int = 2) -> None:
        self.graph = parse_graph(TEXT)
        self.program = program(self.graph, PORTABLE, LIMITS)
        self.lib = ctypes.CDLL(str(cpu.build(self.program, folder)))
        self.lib.planc_open.restype = ctypes.c_void_p
        self.weights = {
            "table": pack(random(50, 8), "n64"),
            "qkv": pack(random(16, 8, seed=1), "n64"),
            "norm": random(8, seed=2),
        }
        self.table, pages = page_table([20, 3], 16)
        self.cache, self.arena = empty_cache(SHAPE, pages), Buffer(ARENA)
        self.handle = ctypes.c_void_p(self.open(threads))

    def open(self, threads: int, weights: int | None = None) -> int | None:
        pointers = [self.weights[n].ctypes.data for n in self.program.weights]
        return self.lib.planc_open(
            (ctypes.c_void_p * len(pointers))(*pointers),
            len(pointers) if weights is None else weights,
            ctypes.c_void_p(self.arena.data.ctypes.data),
            ctypes.c_void_p(self.cache.ctypes.data),
            threads,
        )

    def arrays(self, parts: list[tuple[int, int, int]], rows: list[int]) -> dict[str, np.ndarray]:
        """Graph inputs of a step over (sequence, first position, end position)."""
        positions = np.concatenate([np.arange(a, b) for _, a, b in parts])
        where = np.concatenate([slots(self.table, s, np.arange(a, b), 16) for s, a, b in parts])
        made = {
            "ids": (positions * 7 + 1) % 50,
            "positions": positions,
            "slots": where,
            "page_table": self.table[[s for s, _, _ in parts]],
            "query_start": np.cumsum([0, *(b - a for _, a, b in parts)]),
            "logit_rows": np.array(rows),
        }
        return {k: np.ascontiguousarray(v, np.int32) for k, v in made.items()}

    def step(self, given: dict[str, np.ndarray]) -> int:
        sizes = (len(given["ids"]), len(given["page_table"]), len(given["logit_rows"]), given["page_table"].shape[1])
        batch = Batch(*sizes, *(a.ctypes.data for a in given.values()))
        return self.lib.planc_step(self.handle, ctypes.byref(batch))

    def logits(self, rows: int) -> np.ndarray:
        at = self.program.logits_offset
        return self.arena.data[at : at + rows * 200].view(np.float32).reshape(rows, 50).copy()

    def close(self) -> None:
        self.lib.planc_close(self.handle)


@pytest.fixture
def model(tmp_path: Path):
    made = Model(tmp_path)
    yield made
    made.close()


def test_steps_follow_the_interpreter(model: Model) -> None:
    cache = model.cache.copy()
    for parts, rows in (([(0, 0, 7)], []), ([(0, 7, 9), (1, 0, 2)], [1, 3]), ([(1, 2, 3), (0, 9, 16)], [0, 7])):
        given = model.arrays(parts, rows)
        assert model.step(given) == 0
        want = run(model.graph, given | {"kv": cache}, model.weights)["logits"]
        np.testing.assert_allclose(model.logits(len(rows)), want, rtol=1e-5, atol=1e-5)
    model.arena.check("arena")


def test_bits_do_not_depend_on_threads_or_repetition(tmp_path: Path) -> None:
    seen = set()
    for threads in (1, 2, 5):
        model = Model(tmp_path, threads)
        for _ in range(50):
            assert model.step(model.arrays([(0, 0, 7)], [6])) == 0
            seen.add(model.logits(1).tobytes())
        model.close()
    assert len(seen) == 1


def test_a_batch_beyond_the_limits_is_refused(model: Model) -> None:
    assert model.step(model.arrays([(0, 0, 9)], [0])) == 1
    assert model.step(model.arrays([(0, 0, 1)] * 4, [0])) == 1
    assert model.step(model.arrays([(0, 0, 4)], [0, 1, 2, 3])) == 1
    assert model.lib.planc_step(None, None) == 1


def test_open_checks_its_arguments(model: Model) -> None:
    assert model.open(threads=0) is None
    assert model.open(threads=1, weights=2) is None


def test_idle_threads_use_no_cpu(tmp_path: Path) -> None:
    model = Model(tmp_path, threads=4)
    model.step(model.arrays([(0, 0, 7)], [6]))
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - before < 0.05
    model.close()


def test_program_is_deterministic_and_counts(model: Model) -> None:
    again = program(parse_graph(TEXT), PORTABLE, LIMITS)
    assert again.sources == model.program.sources
    assert model.program.weights == ("table", "qkv", "norm")
    assert model.program.logits_offset == 0x700
    assert sum(model.program.counts.values()) == len(model.program.kernels) == 7
    assert "// lm_head" in model.program.sources["step.cpp"]


def test_only_a_head_that_is_whole_and_last_chooses_tokens() -> None:
    alone = program(parse_graph(TEXT), PORTABLE, LIMITS)
    assert alone.best is not None
    assert f"{alone.best.name}.cpp" in alone.sources
    capped = "  %capped: f32[R, 50] at 0xa00 = tanh(%logits)\n  return %capped"
    assert program(parse_graph(TEXT.replace("  return %logits", capped)), PORTABLE, LIMITS).best is None
    summed = (
        "  %total: f32[T, 8] at 0xd00 = all_reduce(%x, ranks=2)\n  %fused: f32[T, 16] at 0x100 = linear(%total, %qkv)"
    )
    shared = TEXT.replace("  %fused: f32[T, 16] at 0x100 = linear(%x, %qkv)", summed)
    made = program(parse_graph(shared), PORTABLE, LIMITS)
    assert (made.ranks, made.best) == (2, None)


def test_a_value_without_an_address_is_named() -> None:
    graph = parse_graph(TEXT.replace(" at 0x300 = paged", " = paged"))
    with pytest.raises(PlancError, match="%a has no address"):
        program(graph, PORTABLE, LIMITS)


def test_an_unused_weight_is_not_asked_for() -> None:
    graph: Graph = parse_graph(TEXT)
    spare = Weight(Value("spare", graph.types["norm"]), load("spare", "f32", (8,)))
    assert "spare" not in program(replace(graph, weights=(spare, *graph.weights)), PORTABLE, LIMITS).weights


def test_two_kernels_of_one_name_are_an_error() -> None:
    made = program(parse_graph(TEXT), PORTABLE, LIMITS)
    first, last = made.launches[0], made.launches[-1]
    clash = replace(last, kernel=replace(last.kernel, name=first.kernel.name))
    with pytest.raises(AssertionError, match=first.kernel.name):
        _ = replace(made, launches=(*made.launches, clash)).kernels
