"""A checkpoint of several schemes at once becomes a plan that speaks as the checkpoint does, and says what it left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planc.compiler.build import BuildRequest, build
from planc.compiler.source import open_source
from planc.plans import store
from tests.compiler.source.quantized.test_compressed import TOKEN, weights, written
from tests.heard import Heard
from tests.models import tiny

STATIC = dict(type="float", num_bits=8, strategy="tensor", dynamic=False)
GROUPS: dict[str, Any] = dict(
    attention=dict(targets=["re:.*attn.*"], weights=weights("float", 8, "channel"), input_activations=STATIC),
    gates=dict(targets=["re:.*(gate|up)_proj"], weights=weights("int", 4, "group", group_size=32, symmetric=False)),
    down=dict(targets=["re:.*down_proj"], weights=weights("int", 8, "channel"), input_activations=TOKEN),
)


def test_a_checkpoint_of_three_schemes(tmp_path: Path) -> None:
    folder = written(tiny("llama", tmp_path, num_hidden_layers=1), GROUPS)
    with open_source(str(folder)) as source:
        held = dict(source.native)
    assert set(held.values()) == {"fp8", "awq-g32", "int8"}
    request = BuildRequest(
        str(folder),
        tmp_path / "plan",
        kv_cache_dtype="f32",
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=32,
    )
    with Heard() as progress:
        plan = build(request, progress)
    assert any("4 static scales of activations are not used" in line for line in progress.said)
    found = plan.accuracy
    assert found.reference == "transformers f32"
    assert found.mean_kl is not None
    assert found.mean_kl < 0.01
    graph = (tmp_path / "plan" / store.GRAPH).read_text()
    assert all(f"scheme='{name}'" in graph for name in held.values())
