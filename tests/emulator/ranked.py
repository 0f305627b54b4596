"""Whole CUDA plans of several ranks: each spreads its own hash of the tokens, a collective makes the logits of all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from planc.codegen.cuda import aot
from planc.codegen.cuda.call import Bucket
from planc.codegen.cuda.collective import calls, sum_of_parts
from planc.compiler.ir.graph import Node, Value
from planc.compiler.ir.types import TensorType
from planc.plans import launches, ranks, schema, store
from planc.plans.launches import Arg, Buffer, Launch
from planc.plans.ranks import SHARED
from planc.plans.tensors import Writer
from tests.emulator import counting
from tests.emulator.counting import SHIFT, VOCAB, batch

A, B = [20, 21, 22], [50, 60]
STEP = batch([(A, 0, [3]), (B, 0, [1])])


def token(tokens: list[int], rank: int) -> int:
    """What a rank says, from its own beginning of the hash."""
    start = SHIFT + 99 * rank
    for t in tokens:
        start = (start * 31 + t) % 2**32
    return 10 + start % (VOCAB - 10)


def one_hot(*tokens: int) -> np.ndarray:
    return np.eye(VOCAB, dtype=np.float32)[list(tokens)]


def write_plan(root: Path, op: str | None, elements: int = 0, count: int = 2) -> tuple[Path, schema.Plan]:
    """Makes `counting`'s plan one of several ranks: each spreads its logits over `part`, and `op` makes the logits of
    them; without one, the ranks have different ones.
    """
    plan, held = counting.write_plan(root), launches.load(root)
    part = replace(held.buffer["logits"], name="part", offset=held.arenas["act"])
    shared = Buffer(SHARED, SHARED, 0, ranks.nbytes(count))
    binaries = _compiled(op, count, root) if op else ()
    graphs = []
    for graph in held.graphs:
        key, logits = graph.launches[2].args
        spread = replace(graph.launches[2], args=(key, Arg("buffer", "part") if op else logits))
        args = (Arg("buffer", "part"), Arg("buffer", "logits"), Arg("i64", elements), Arg("buffer", SHARED))
        last = (Launch(binaries[0].name, (ranks.blocks(elements), 1, 1), args, (2,)),) if op else ()
        graphs.append(replace(graph, launches=(*graph.launches[:2], spread, *last)))
    made = replace(
        held,
        binaries=(*held.binaries, *binaries),
        buffers=(*held.buffers, part, shared),
        arenas=held.arenas | {"act": part.offset + -(-part.nbytes // 256) * 256, SHARED: shared.nbytes},
        graphs=tuple(graphs),
    )
    launches.save(root, made)
    for rank in range(count):
        with Writer(root / schema.rank_file(rank), [("shift", "i32", (1,), 4)]) as file:
            file.write("shift", np.array([SHIFT + 99 * rank], np.int32))
    files = tuple(schema.rank_file(rank) for rank in range(count))
    return root, store.seal(root, replace(plan, limits=replace(plan.limits, ranks=count), weight_files=files))


def _compiled(op: str, count: int, root: Path) -> tuple[launches.Binary, ...]:
    attrs = {"ranks": count, "starts": tuple(range(0, 8 * count, 8)), "size": 8 * count}
    out = TensorType("f32", ("T", 8 * count if op == "all_gather" else 8))
    node = Node(op, ("x",), (Value("y", out),), tuple(attrs.items()))
    made = calls(node, {"x": TensorType("f32", ("T", 8))}, Bucket(1, 1, 1))
    return aot.compile([made[0].kernel, sum_of_parts(count)], 90, root / "kernels")
