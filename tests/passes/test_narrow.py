"""What only products that round read is bf16 on a GPU, nothing else is, and it can be taken back."""

import numpy as np
import pytest

from planc.codegen.target import parse
from planc.compiler.ir.graph import Graph
from planc.compiler.ir.ops import OPS
from planc.compiler.ir.text import to_text
from planc.compiler.ir.types import DTYPES
from planc.compiler.ir.verify import verify
from planc.passes import pipeline
from planc.passes.narrow import narrow, widened
from planc.passes.options import Options
from tests.lifted import lifted
from tests.models import tiny
from tests.moe import MOE


def planned(arch: str, tmp_path, target: str = "sm_90a", dtype: str = "bf16", kv: str = "bf16") -> Graph:
    model = lifted(tiny(arch, tmp_path, **MOE.get(arch, {})))
    return pipeline.run(model.graph, Options(parse(target), dtype, kv, 256, 8, 64, 16))[0]


def dtypes(graph: Graph, op: str) -> set[str]:
    return {n.out.type.dtype for n in graph.nodes if n.op == op}


@pytest.mark.parametrize("dtype", ["bf16", "int4-wo-g32", "int8-wo"])
def test_a_llama(tmp_path, dtype: str) -> None:
    graph = planned("llama", tmp_path, dtype=dtype)
    for op in ("rms_norm", "add_rms_norm", "act_mul", "rotary_append", "paged_attention"):
        assert dtypes(graph, op) == {"bf16"}, op
    sums = [n.outputs[1].type.dtype for n in graph.nodes if n.op == "add_rms_norm"]
    assert set(sums) == {"f32"}, "the residual stays as it is"


@pytest.mark.parametrize(
    ("target", "dtype", "kv", "wide"),
    [
        ("cpu:x86-64-v3", "bf16", "bf16", {"rms_norm", "act_mul", "rotary_append", "paged_attention"}),
        ("sm_90a", "f32", "bf16", {"rms_norm", "act_mul", "paged_attention"}),
        ("sm_90a", "bf16", "f32", {"rotary_append"}),
    ],
)
def test_what_is_not_rounded_stays_wide(tmp_path, target: str, dtype: str, kv: str, wide: set[str]) -> None:
    graph = planned("llama", tmp_path, target, dtype, kv)
    ops = {"rms_norm", "act_mul", "rotary_append", "paged_attention"}
    assert {op for op in ops if dtypes(graph, op) == {"f32"}} == wide
    assert {op for op in ops if dtypes(graph, op) == {"bf16"}} == ops - wide


def test_experts_and_their_router(tmp_path) -> None:
    graph = planned("mixtral", tmp_path)
    norms = {n.out.name: n for n in graph.nodes if n.op == "add_rms_norm"}
    read = {name: {u.op for u in graph.users[name]} for name in norms}
    assert any("expert_linear" in ops for ops in read.values())
    assert all(norms[name].out.type.dtype == "bf16" for name, ops in read.items() if "expert_linear" in ops)


def test_a_graph_of_one_target_only_is_changed_and_can_be_had_back(tmp_path) -> None:
    graph = planned("llama", tmp_path)
    wide = widened(graph)
    verify(wide, "widened")
    assert to_text(widened(wide)) == to_text(wide) != to_text(graph)
    again, count = narrow(wide, Options(parse("sm_90a"), "bf16", "bf16", 256, 8, 64, 16))
    assert count == sum("out" in dict(n.attrs) for n in graph.nodes)
    assert [n.outputs for n in again.nodes] == [n.outputs for n in graph.nodes]


def test_the_reference_rounds_its_first_result_alone() -> None:
    rng = np.random.default_rng()
    x, y, w = (rng.standard_normal(s).astype(np.float32) for s in ((5, 24), (5, 24), (24,)))
    attrs = {"eps": 1e-6}
    wide, total = OPS["add_rms_norm"].ref(attrs, (x, y, w), ())
    narrowed, same = OPS["add_rms_norm"].ref(attrs | {"out": "bf16"}, (x, y, w), ())
    np.testing.assert_array_equal(narrowed, wide.astype(DTYPES["bf16"]))
    np.testing.assert_array_equal(same, total)
