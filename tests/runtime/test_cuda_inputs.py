"""Inputs of a bucket: what a batch leaves empty does nothing, whatever another step has left there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planc.plans.launches import Buffer, LaunchPlan, StepGraph, input_buffers
from planc.plans.sampling import RECORD, SAMPLED
from planc.runtime.cuda_inputs import StepInputs, staging_bytes
from tests.emulator.counting import PAGES, batch

START = 256
STEP = batch([([7, 8, 9], 0, [2]), ([5, 6], 1, [1])])
RECORDS = np.arange(2 * RECORD, dtype=np.int32).reshape(2, RECORD) + 1


def plan(samples: bool) -> LaunchPlan:
    graphs = tuple(
        StepGraph(*sizes, input_buffers(sizes, PAGES, samples, START), ()) for sizes in ((8, 4, 3), (64, 4, 4))
    )
    buffers = (Buffer(SAMPLED, "io", 0, 32),) if samples else ()
    return LaunchPlan(90, (), buffers, {"io": 8192}, graphs, "logits", PAGES)


def filled(samples: bool, records: np.ndarray | None) -> dict[str, list[int]]:
    """The smaller bucket, where a step was before."""
    held = plan(samples)
    staging = np.full(staging_bytes(held.graphs), 0x7F, np.uint8)
    inputs = StepInputs(held, held.graphs[0], staging)
    inputs.fill(STEP, records)
    assert inputs.offset == START
    assert (staging[inputs.bytes.nbytes :] == 0x7F).all()
    return {b.name: inputs.bytes[b.offset - START :][: b.nbytes].view(np.int32).tolist() for b in held.graphs[0].inputs}


@pytest.mark.parametrize("samples", [False, True])
def test_a_batch_is_filled_up_to_its_bucket(samples: bool) -> None:
    found = filled(samples, None)
    assert found["ids"] == [7, 8, 9, 6, 0, 0, 0, 0]
    assert found["positions"] == [0, 1, 2, 1, 0, 0, 0, 0]
    assert found["slots"] == [*STEP.slots.tolist(), -1, -1, -1, -1]
    assert found["query_start"] == [0, 3, 4, 4, 4]
    assert found["logit_rows"] == [2, 3, 0]
    assert found["page_table"] == [*STEP.page_table.ravel().tolist(), *[0] * (2 * PAGES)]
    assert found.get("records", [0]) == [0] * (3 * RECORD if samples else 1)


def test_records_of_rows_and_none_of_the_others() -> None:
    assert filled(True, RECORDS)["records"] == [*RECORDS.ravel().tolist(), *[0] * RECORD]


def test_a_page_table_of_few_columns() -> None:
    held = plan(False)
    inputs = StepInputs(held, held.graphs[0], np.full(staging_bytes(held.graphs), 0x7F, np.uint8))
    short = batch([([7, 8], 0, [2])])
    inputs.fill(replace(short, page_table=short.page_table[:, :1]), None)
    table = held.graphs[0].inputs[3]
    assert inputs.bytes[table.offset - START :][: table.nbytes].view(np.int32).tolist() == [2] + [0] * (4 * PAGES - 1)
