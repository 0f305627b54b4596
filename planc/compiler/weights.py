"""Weights of a planned graph: in go recipes and a model source, out come the plan's weight files, one tensor at a time.

Memory stays at the largest tensor and what its recipe makes of it, of a stack of experts at some of them: nothing is
kept between two weights.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np

from planc.compiler.ir.graph import Graph, Weight
from planc.compiler.ir.packing import packed_shape
from planc.compiler.ir.parts import pieces
from planc.compiler.ir.recipe import Reader, RowReader
from planc.compiler.ir.shards import of_rank, ranks_of
from planc.compiler.ir.types import PACKED, TensorType
from planc.errors import PlancError
from planc.plans.schema import rank_file
from planc.plans.tensors import Writer

CONSTANTS_FILE = "weights/constants.safetensors"


def rank_files(ranks: int) -> tuple[str, ...]:
    """`weights/rank<r>.safetensors` of each rank."""
    return tuple(map(rank_file, range(ranks)))


def split(graph: Graph) -> tuple[list[Weight], list[Weight]]:
    """The graph's weights that the compiler made alone, and those that need the checkpoint or differ by rank."""
    own = {w.name: bool(w.recipe.loads) or ranks_of(w.recipe) > 1 for w in graph.weights}
    return [w for w in graph.weights if not own[w.name]], [w for w in graph.weights if own[w.name]]


def total_bytes(weights: list[Weight]) -> int:
    """Bytes that the weights take in their file, fillers left out."""
    return sum(w.value.type.nbytes() for w in weights)


def write_constants(graph: Graph, root: Path) -> None:
    """Writes `weights/constants.safetensors` below `root`."""
    _write(split(graph)[0], root / CONSTANTS_FILE, _no_checkpoint, None, graph, lambda done: None)


def write_weights(
    graph: Graph,
    read: Reader,
    root: Path,
    progress: Callable[[int], None],
    rows: RowReader | None = None,
    ranks: int = 1,
) -> None:
    """Writes the file of each rank below `root`; `progress` gets the bytes written, piece by piece.

    `rows` reads a range of a tensor's first axis: with it, a stack of experts that the checkpoint holds as one tensor
    is read and written some experts at a time.
    Raises PlancError naming the weight when a checkpoint tensor is not what the graph was compiled for.
    """
    found = split(graph)[1]
    for rank, name in enumerate(rank_files(ranks)):
        mine = [replace(w, recipe=of_rank(w.recipe, rank)) for w in found]
        _write(mine, root / name, read, rows, graph, progress)


def stored_shape(t: TensorType) -> tuple[int, ...]:
    """Shape of a weight as stored: packed layouts have [.., N/64, K/g, 64, g]."""
    if t.layout not in PACKED:
        return tuple(int(d) for d in t.shape)
    return packed_shape([int(d) for d in t.shape], t.layout)


def _no_checkpoint(name: str) -> np.ndarray:
    raise KeyError(name)


def _write(
    weights: list[Weight],
    path: Path,
    read: Reader,
    rows: RowReader | None,
    graph: Graph,
    progress: Callable[[int], None],
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = [(w.name, w.value.type.dtype, stored_shape(w.value.type), w.value.type.nbytes()) for w in weights]
    assert all(prod(shape) for _, _, shape, _ in table)
    with Writer(path, table) as out:
        for w in weights:
            try:
                out.write_pieces(w.name, _reported(pieces(w.recipe, read, graph.constants, rows), progress))
            except ValueError as e:
                raise PlancError(f"weight {w.name}: {e}") from e


def _reported(arrays: Iterator[np.ndarray], progress: Callable[[int], None]) -> Iterator[np.ndarray]:
    for array in arrays:
        yield array
        progress(array.nbytes)
