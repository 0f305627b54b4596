"""A build's memory does not grow with the model: weights stream one at a time, and mapped ones do not pile up."""

import resource
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from planc.codegen.target import parse
from planc.compiler import residency, weights
from planc.passes import pipeline
from planc.passes.options import Options
from planc.plans import store
from planc.runtime.cpu import CpuExecutor
from planc.runtime.goldens import Scorer
from tests.lifted import lifted
from tests.models import tiny


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
def test_weights_stream_one_tensor_at_a_time(tmp_path: Path, dtype: str) -> None:
    model = lifted(tiny("llama", tmp_path / "model", num_hidden_layers=24, intermediate_size=512, hidden_size=256))
    options = Options(parse("cpu:portable"), dtype, "f32", 256, 8, 64, 16)
    graph, _ = pipeline.run(model.graph, options)
    total = sum(t.nbytes for t in model.source.tensors.values())
    largest = 2 * 512 * 256 * 4  # gate and up together, in float32
    tracemalloc.start()
    weights.write_weights(graph, model.source.read, tmp_path, lambda done: None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total > 40 * 2**20
    assert peak < 4 * largest + 2**20


def test_mapped_weights_are_given_back_while_a_plan_runs(plan, monkeypatch) -> None:
    """Logits stay equal to the bit although pages go while a step reads them; the thread ends with the block."""
    path = plan("llama")
    loaded = store.load(path)
    executor = CpuExecutor(path, loaded, 16, 2)
    released = []
    monkeypatch.setattr(residency, "_SMALL", 0)
    monkeypatch.setattr(residency, "_PERIOD", 0.0005)
    original = executor.release_weights
    monkeypatch.setattr(executor, "release_weights", lambda: (original(), released.append(time.monotonic())))
    scorer = Scorer(executor, 16, 64)
    ids = np.random.default_rng(0).integers(3, 330, 200).tolist()
    want = scorer.logits(ids, 0)
    with residency.bounded(executor, 1):
        for _ in range(20):
            assert (scorer.logits(ids, 0).view(np.uint32) == want.view(np.uint32)).all()
    count = len(released)
    assert count > 10
    time.sleep(0.02)
    assert len(released) == count
    executor.close()


def test_released_pages_leave_the_resident_set(tmp_path: Path) -> None:
    from planc.plans.tensors import Writer
    from planc.runtime.weights import MappedWeights

    size = 64 * 2**20
    with Writer(tmp_path / "w", [("w", "u8", (size,), size)]) as out:
        out.write("w", np.ones(size, np.uint8))
    mapped = MappedWeights(tmp_path / "w")
    before = resident()
    assert int(np.frombuffer(mapped._map, np.uint8)[::4096].sum()) > 0
    assert resident() - before > size * 0.9
    mapped.release()
    assert resident() - before < size * 0.1


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
