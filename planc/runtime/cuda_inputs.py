"""The inputs of a bucket in pinned memory: in goes a batch, out come the bytes that one copy brings to the GPU.

They lie there as they lie in device memory, one behind the other, so that a step sends no more than its bucket holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planc.plans import sampling
from planc.plans.launches import LaunchPlan, StepGraph
from planc.runtime.batch import Batch, Int32


def staging_bytes(graphs: Sequence[StepGraph]) -> int:
    """Bytes of pinned memory that hold the inputs of any of these."""
    spans = (graph.input_span for graph in graphs)
    return max((stop - start for start, stop in spans), default=0)


class StepInputs:
    """What a bucket is told of a step. All buckets share `staging`, where one step's inputs lie at a time."""

    def __init__(self, plan: LaunchPlan, step: StepGraph, staging: NDArray[np.uint8]) -> None:
        self.offset, stop = step.input_span  # in the arena io
        self.bytes = staging[: stop - self.offset]
        self._views: dict[str, Int32] = {
            b.name: staging[b.offset - self.offset :][: b.nbytes].view(np.int32) for b in step.inputs
        }
        self._table = self._views["page_table"].reshape(-1, plan.page_table_stride)
        records = self._views.get(sampling.RECORDS)
        self._records = None if records is None else records.reshape(-1, sampling.RECORD)

    def fill(self, batch: Batch, records: Int32 | None) -> None:
        """Takes a batch, filled up to the bucket with tokens, sequences and rows that do nothing; rows without a record
        are left as they are.
        """
        self._put("ids", batch.ids, 0)
        self._put("positions", batch.positions, 0)
        self._put("slots", batch.slots, -1)
        self._put("query_start", batch.query_start, int(batch.query_start[-1]))
        self._put("logit_rows", batch.logit_rows, 0)
        seqs, columns = batch.page_table.shape
        self._table[:seqs, :columns] = batch.page_table
        self._table[:seqs, columns:] = 0
        self._table[seqs:] = 0
        if self._records is not None:
            count = 0 if records is None else len(records)
            self._records[count:] = 0
            if records is not None:
                self._records[:count] = records

    def _put(self, name: str, values: Int32, padding: int) -> None:
        view = self._views[name]
        view[: len(values)] = values
        view[len(values) :] = padding
