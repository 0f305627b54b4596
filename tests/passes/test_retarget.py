"""A plan's graph for another target is the one that the pipeline plans for it."""

from dataclasses import replace

import pytest

from planc.codegen.target import parse
from planc.compiler.ir.text import to_text
from planc.passes import pipeline
from planc.passes.options import Options
from planc.passes.retarget import retarget, unplanned
from tests.lifted import lifted
from tests.models import tiny
from tests.moe import MOE

CASES = [
    ("mixtral", "int8", "i8", 2),
    pytest.param("gemma2", "bf16", "bf16", 1, marks=pytest.mark.slow),
    pytest.param("llama", "int4-wo-g32", "f8e4m3", 1, marks=pytest.mark.slow),
    pytest.param("gpt_oss", "fp8", "bf16", 2, marks=pytest.mark.slow),
    pytest.param("bloom", "f32", "f32", 2, marks=pytest.mark.slow),
    pytest.param("deepseek_v3", "bf16", "bf16", 2, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("arch", "dtype", "kv", "tp"), CASES)
def test_both_ways(tmp_path, arch: str, dtype: str, kv: str, tp: int) -> None:
    model = lifted(tiny(arch, tmp_path, **MOE.get(arch, {})))
    gpu = Options(parse("sm_90a"), dtype, kv, 256, 8, 64, 16, tp=tp)
    cpu = replace(gpu, target=parse("cpu:x86-64-v3"), kv_dtype={"f8e4m3": "f8e3m4"}.get(kv, kv))
    planned = {o.target: pipeline.run(model.graph, o)[0] for o in (gpu, cpu)}
    assert planned[gpu.target] != planned[cpu.target]
    for source, target in ((gpu, cpu), (cpu, gpu)):
        assert to_text(retarget(planned[source.target], target)) == to_text(planned[target.target])


def test_nothing_of_a_target_is_left(tmp_path) -> None:
    model = lifted(tiny("llama", tmp_path))
    graph, _ = pipeline.run(model.graph, Options(parse("cpu:portable"), "bf16", "bf16", 256, 8, 64, 16))
    plain = unplanned(graph)
    assert [n.op for n in plain.nodes].count("attention") == 2
    assert not {"kv_append", "paged_attention"} & {n.op for n in plain.nodes}
    assert all(w.value.type.layout == "row" for w in plain.weights)
