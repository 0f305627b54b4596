"""Weights of a planned graph: in go recipes and a model source, out come the plan's weight files, one tensor at a time.

Memory stays at the largest tensor and what its recipe makes of it, of a stack of experts at some of them: nothing is
kept between two weights.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from planc.compiler.ir.graph import Graph, Weight
from planc.compiler.ir.packing import packed_shape
from planc.compiler.ir.parts import pieces
from planc.compiler.ir.recipe import Reader, RowReader
from planc.compiler.ir.shards import of_rank, ranks_of
from planc.compiler.ir.types import DTYPES, PACKED, TensorType, dtype_name
from planc.compiler.progress import Progress
from planc.errors import PlancError
from planc.plans.schema import rank_file
from planc.plans.tensors import Writer, read_header

if TYPE_CHECKING:
    from planc.compiler.source.base import ModelSource

CONSTANTS_FILE = "weights/constants.safetensors"
LEAVES_FILE = "weights/leaves.safetensors"  # in plans without weights: constants that making the weights will take


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


def write_leaves(graph: Graph, root: Path) -> None:
    """Writes `weights/leaves.safetensors` below `root`: the constants of recipes, by digest, that are no weights of
    their own. None are written where there are none.
    """
    whole = {w.recipe for w in split(graph)[0]}
    leaves = {r for w in graph.weights for r in w.recipe.leaves() if r.op == "const" and r not in whole}
    arrays = {digest: graph.constants[digest] for digest in sorted(str(r.get("digest")) for r in leaves)}
    if not arrays:
        return
    table = [(digest, dtype_name(a.dtype), a.shape, a.nbytes) for digest, a in arrays.items()]
    (root / LEAVES_FILE).parent.mkdir(parents=True, exist_ok=True)
    with Writer(root / LEAVES_FILE, table) as out:
        for digest, array in arrays.items():
            out.write(digest, array)


def read_constants(graph: Graph, root: Path) -> dict[str, np.ndarray]:
    """The constants of a plan's graph by digest, from the files that a build without weights wrote below `root`.

    PlancError when one is in neither.
    """
    found = dict(_arrays(root / LEAVES_FILE)) if (root / LEAVES_FILE).exists() else {}
    whole = {w.name: str(w.recipe.get("digest")) for w in split(graph)[0] if w.recipe.op == "const"}
    found |= {whole[name]: array for name, array in _arrays(root / CONSTANTS_FILE) if name in whole}
    for w in graph.weights:
        for r in w.recipe.leaves():
            if r.op == "const" and r.get("digest") not in found:
                raise PlancError(f"{root} lacks the constant {r.get('digest')} of {w.name}; build the plan again.")
    return found


def _arrays(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of a file, mapped."""
    for name, e in read_header(path).items():
        flat = np.memmap(path, np.uint8, "r", e.offset, e.nbytes) if e.nbytes else np.empty(0, np.uint8)
        yield name, flat.view(DTYPES[e.dtype]).reshape(e.shape)


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


def pack_weights(graph: Graph, source: "ModelSource", root: Path, ranks: int, progress: Progress) -> None:
    """`write_weights` of a source, with a bar."""
    bar = progress.bytes("weights", ranks * total_bytes(split(graph)[1]))
    write_weights(graph, source.read, root, bar, source.read_rows, ranks)


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
