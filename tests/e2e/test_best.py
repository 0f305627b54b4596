"""Greedy steps choose tokens without writing logits; what needs logits has them, and the tokens are the same."""

import numpy as np
import pytest

from planc.plans import sampling, store
from planc.runtime.batch import Piece, packed
from planc.runtime.cpu import CpuExecutor


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_logits_are_written_where_they_are_wanted(plan, dtype: str) -> None:
    root = plan("llama", dtype)
    executor = CpuExecutor(root, store.load(root), 64, 2)
    try:
        rng = np.random.default_rng(0)
        pieces = [Piece([int(i) for i in rng.integers(3, 300, n)], 0, 8 * at) for at, n in enumerate((7, 1, 20))]
        batch = packed(pieces, executor.block_size)
        logits = executor.step(batch).copy()
        records = np.zeros((len(logits), sampling.RECORD), np.int32)
        records[:, sampling.KIND], records[:, sampling.SEQUENCE] = sampling.GREEDY, range(len(records))
        records.view(np.float32)[:, sampling.REPETITION] = 1.0
        for changed in (None, sampling.FREQUENCY, sampling.TEMPERATURE):
            executor.step(batch)[...] = 0
            given = records.copy()
            if changed is not None:
                given.view(np.float32)[1, changed] = 1e-30  # of no consequence for these logits
            found, left = executor.sample_step(batch, given)
            assert found[:, 0].tolist() == logits.argmax(axis=1).tolist()
            assert found[:, 1].tobytes() == logits.max(axis=1).tobytes()
            assert np.array_equal(left, logits) == (changed == sampling.FREQUENCY)  # other values had their place
        given = records.copy()
        given[2, sampling.KIND] = sampling.HOST
        _, left = executor.sample_step(batch, given)
        assert left[2].tobytes() == logits[2].tobytes()
    finally:
        executor.close()
