"""Errors of weights: of a planned graph, against what the scheme's own reference loses."""

import numpy as np
import pytest

from planc.compiler import weight_errors
from planc.compiler.ir.graph import Graph, Node, Value, Weight
from planc.compiler.ir.quant import SCHEMES
from planc.compiler.ir.recipe import Recipe, constant, infer, load, step
from planc.compiler.ir.types import TensorType
from planc.compiler.weight_errors import errors, module_of, quantized, samples

RNG = np.random.default_rng(3)


def graph_of(recipes: dict[str, Recipe], op: str, constants: dict[str, np.ndarray] | None = None) -> Graph:
    """One node that reads the parts; only what reads a weight counts here."""
    weights = tuple(Weight(Value(name, infer(r)), r) for name, r in recipes.items())
    out = Value("y", TensorType("f32", ("T", 8)))
    node = Node(op, ("x", *recipes), (out,), (("scheme", "int8-wo"),))
    return Graph("g", (Value("x", TensorType("f32", ("T", 8))),), weights, (node,), ("y",), constants or {})


def parts(scheme: str, *inputs: Recipe) -> dict[str, Recipe]:
    made = {p: step("quantize", *inputs, scheme=scheme, part=p) for p in SCHEMES[scheme].parts}
    return {f"w.{p}": step("pack", r, layout="n64u4") if p + scheme == "qint8-wo" else r for p, r in made.items()}


def relative(w: np.ndarray, scheme: str, clip: np.ndarray | None = None) -> float:
    row = SCHEMES[scheme]
    stored = row.dequantize(*(row.part(w, p, clip) for p in row.parts))
    return float(np.linalg.norm(stored - w) / np.linalg.norm(w))


@pytest.mark.parametrize("scheme", ["int8-wo", "fp8", "fp8-block", "awq-g64", "int4-wo-g32"])
def test_the_error_is_that_of_the_stored_values(scheme: str) -> None:
    w = RNG.standard_normal((200, 256), np.float32)
    recipe = step("concat", *[load(f"l.0.{n}.weight", "f32", (100, 256)) for n in "ab"], axis=0)
    read = {"l.0.a.weight": w[:100], "l.0.b.weight": w[100:]}.__getitem__
    (found,) = errors(graph_of(parts(scheme, recipe), "qlinear"), read)
    assert found.modules == ("l.0.a", "l.0.b")
    assert (found.kind, found.scheme) == ("linear", scheme)
    assert found.error == pytest.approx(relative(w, scheme), rel=5e-3)


def test_bounds_count() -> None:
    w = RNG.standard_normal((64, 128), np.float32)
    bounds = np.full((2, 64), 1.5, np.float32)
    clip, constants = constant(bounds)
    graph = graph_of(parts("awq-g64", load("a.weight", "f32", (64, 128)), clip), "qlinear", constants)
    (found,) = errors(graph, lambda name: w)
    assert found.error == pytest.approx(relative(w, "awq-g64", bounds), rel=5e-3)
    assert found.error > 1.2 * relative(w, "awq-g64")


def test_second_digits_count() -> None:
    w, outliers = RNG.standard_normal((64, 128), np.float32), np.array([3, 70], np.int32)
    w[:, outliers] *= 100
    chosen, constants = constant(outliers)
    graph = graph_of(parts("fp8", load("a.weight", "f32", (64, 128)), chosen), "qlinear", constants)
    (weight,) = quantized(graph)
    assert weight.shape == (64, 128)
    assert weight.stored(w, None).shape == w.shape
    (found,) = errors(graph, lambda name: w)
    assert found.error < 0.5 * relative(w, "fp8")


def test_large_weights_are_sampled_in_whole_blocks(monkeypatch) -> None:
    monkeypatch.setattr(weight_errors, "SAMPLE", 3 * 128 * 256)
    w = RNG.standard_normal((1000, 256), np.float32)
    (weight,) = quantized(graph_of(parts("fp8-block", load("a", "f32", w.shape)), "qlinear"))
    taken = [rows for rows, _ in samples(weight, lambda name: w, {}, None)]
    assert [len(rows) for rows in taken] == [128, 128, 1000 - 7 * 128]
    (found,) = errors(graph_of(parts("fp8-block", load("a", "f32", w.shape)), "qlinear"), lambda name: w)
    assert found.error == pytest.approx(relative(w, "fp8-block"), rel=0.05)


def test_a_stack_of_experts_is_read_expert_by_expert(monkeypatch) -> None:
    monkeypatch.setattr(weight_errors, "SAMPLE", 2 * 32 * 64)
    w = RNG.standard_normal((5, 32, 64), np.float32)
    graph = graph_of(parts("int8-wo", load("l.0.experts.up", "f32", w.shape)), "qexpert_linear")
    seen = []

    def rows(name: str, start: int, stop: int) -> np.ndarray:
        seen.append((start, stop))
        return w[start:stop]

    (found,) = errors(graph, lambda name: w, rows)
    assert seen == [(0, 1), (4, 5)]
    assert found.kind == "expert"
    assert found.error == pytest.approx(relative(w[[0, 4]], "int8-wo"), rel=5e-3)


def test_what_is_not_rounded_has_no_error() -> None:
    plain = {"w.bf16": step("cast", load("a", "f32", (8, 8)), dtype="bf16")}
    held = {"w.q": load("a:q", "i8", (8, 8)), "w.s": load("a:s", "f32", (8,))}
    assert errors(graph_of(plain, "linear"), lambda name: np.zeros(1)) == ()
    assert errors(graph_of(held, "qlinear"), lambda name: np.zeros(1)) == ()
    zero = graph_of(parts("int8-wo", load("a", "f32", (8, 8))), "qlinear")
    assert errors(zero, lambda name: np.zeros((8, 8), np.float32))[0].error == 0


def test_modules_are_named_by_layer_and_not_by_expert() -> None:
    assert module_of("model.layers.3.mlp.experts.17.up_proj.weight") == "model.layers.3.mlp.experts.*.up_proj"
    assert module_of("h.0.mlp.fc1.weight") == "h.0.mlp.fc1"
    assert module_of("lm_head.weight") == "lm_head"
