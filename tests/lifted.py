"""Graphs of tiny random models for tests: in goes a folder, out come its lifted graph, its source, its inputs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from planc.compiler.ir.graph import Graph
from planc.compiler.ir.interp import run, weights_of
from planc.compiler.lift import lift
from planc.compiler.source import ModelSource, open_source
from planc.compiler.source.bind import bind
from planc.compiler.trace import trace

BLOCK = 16
PAGES = np.array([[3, 1, 5, 0, 7, 2]], np.int32)


@dataclass(frozen=True)
class Lifted:
    graph: Graph
    source: ModelSource
    path: Path


def lifted(path: Path) -> Lifted:
    """The lifted graph of a model folder."""
    source = open_source(str(path))
    bindings = []
    traced = trace(source.config(), prepare=lambda model: bindings.append(bind(model, source)))
    return Lifted(lift(traced, bindings[0].recipes), source, path)


def inputs(graph: Graph, ids: np.ndarray, rows: list[int]) -> dict[str, np.ndarray]:
    """One sequence from position 0, scattered over pages, for graphs before and after kv_layout."""
    positions = np.arange(len(ids), dtype=np.int32)
    page_bytes = next(int(v.type.shape[1]) for v in graph.inputs if v.name == "kv")
    return {
        "ids": ids.astype(np.int32),
        "positions": positions,
        "slots": PAGES[0][positions // BLOCK] * BLOCK + positions % BLOCK,
        "page_table": PAGES,
        "query_start": np.array([0, len(ids)], np.int32),
        "logit_rows": np.array(rows, np.int32),
        "kv": np.zeros((PAGES.max() + 1, page_bytes), np.uint8),
    }


def logits(model: Lifted, graph: Graph, ids: np.ndarray, rows: list[int]) -> np.ndarray:
    """The interpreter's logits of some rows."""
    weights = weights_of(graph, model.source.read, graph.constants)
    return run(graph, inputs(graph, ids, rows), weights)[graph.outputs[0]]


def hugging_face(path: Path, ids: np.ndarray, **kwargs: Any) -> np.ndarray:
    """transformers' float32 logits [T, vocab] of a model folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **kwargs).eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor(ids[None].astype(np.int64)), use_cache=False).logits[0].numpy()


def relative_error(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference over the largest value of `b`; NaN anywhere gives NaN."""
    return float(np.abs(a - b).max() / np.abs(b).max())
