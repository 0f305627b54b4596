"""Norms of keys and queries are balanced for caches of i8 alone, scores stay, and what has no such norms is left."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from planc.codegen.target import parse
from planc.passes import pipeline
from planc.passes.options import Options
from tests.lifted import Lifted, hugging_face, lifted, logits, relative_error
from tests.models import tiny

ROWS = [40, 3, 7]


def options(kv: str) -> Options:
    return Options(parse("cpu:portable"), "f32", kv, 256, 8, 64, 16)


@pytest.fixture(scope="module", params=[("qwen3", 2), ("gemma3_text", 2), ("gemma3_text", 1)], ids=str)
def model(request, tmp_path_factory) -> Lifted:
    """With norms whose weights are uneven."""
    arch, heads = request.param
    path = tiny(arch, tmp_path_factory.mktemp(arch), num_key_value_heads=heads)
    (file,) = path.glob("*.safetensors")
    tensors, rng = load_file(file), np.random.default_rng(0)
    for name in tensors:
        if "k_norm" in name or "q_norm" in name:
            tensors[name] = (tensors[name] + 8 * rng.standard_normal(tensors[name].shape) ** 3).astype(np.float32)
    save_file(tensors, file, {"format": "pt"})
    return lifted(path)


def balanced(model: Lifted, kv: str) -> int:
    graph, log = pipeline.run(model.graph, options(kv))
    count = sum(w.recipe.op == "balance" for w in graph.weights)
    assert count == 2 * next(row.matches for row in log if row.name == "balance")
    return count


def test_every_layer_with_norms_of_its_own(model: Lifted) -> None:
    layers = sum(n.op == "paged_attention" for n in pipeline.run(model.graph, options("f32"))[0].nodes)
    assert balanced(model, "i8") == 2 * layers > 0
    assert balanced(model, "f8e3m4") == balanced(model, "bf16") == 0


def test_the_pass_changes_no_logit(model: Lifted) -> None:
    ids = np.random.default_rng(0).integers(3, 300, 41)
    first = [row.name for row in pipeline.PIPELINE].index("balance")
    before, _ = pipeline.run(model.graph, options("i8"), pipeline=pipeline.PIPELINE[:first])
    after, _ = pipeline.run(before, options("i8"), pipeline=pipeline.PIPELINE[first : first + 1])
    norms = [n for n in after.nodes if n.op == "rms_norm" and n not in before.nodes]
    assert norms
    want, got = (logits(model, graph, ids, ROWS) for graph in (before, after))
    np.testing.assert_array_equal(got, want)
    assert relative_error(got, hugging_face(model.path, ids)[ROWS]) < 5e-6


def test_without_norms_nothing_changes(tmp_path) -> None:
    assert balanced(lifted(tiny("llama", tmp_path)), "i8") == 0
