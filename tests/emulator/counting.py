"""A whole CUDA plan around three small kernels, for any SM, and what its model says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from planc.codegen.cuda.aot import compile as compile_kernels
from planc.codegen.cuda.call import TritonKernel
from planc.plans import launches, schema, store
from planc.plans.launches import KV, Arg, Binary, Buffer, Launch, LaunchPlan, StepGraph
from planc.plans.tensors import Writer
from planc.runtime.batch import Batch
from planc.runtime.cuda_driver import Gpu
from tests.runtime.cplan import BLOCK, MAX_LEN, MAX_SEQS, MAX_TOKENS, PLAN, SHIFT, VOCAB, expected

SOURCES = Path(__file__).parent / "kernels"
PAGES = MAX_LEN // BLOCK
WIDTH = 256
PTR = "*i32"

__all__ = ["PAGES", "batch", "expected", "write_plan"]


def kernel(function: str, signature: dict[str, str], constants: dict[str, Any]) -> TritonKernel:
    return TritonKernel(f"counting-{function}", "counting", function, signature, constants, frozenset(), 1, 1)


KERNELS = (
    kernel("append", {"ids_ptr": PTR, "slots_ptr": PTR, "kv_ptr": PTR}, {}),
    kernel(
        "digest",
        dict.fromkeys(("positions_ptr", "table_ptr", "start_ptr", "rows_ptr", "kv_ptr", "shift_ptr", "key_ptr"), PTR)
        | {"stride": "i32", "seqs": "i32"},
        {"BLOCK": BLOCK},
    ),
    kernel("spread", {"key_ptr": PTR, "logits_ptr": "*fp32"}, {"VOCAB": VOCAB, "WIDTH": WIDTH}),
)


def step(tokens: int, seqs: int) -> StepGraph:
    """The launches of a bucket; as many rows as sequences."""
    names = ("positions", "page_table", "query_start", "logit_rows", KV, "shift", "key")
    pointers = tuple(Arg("buffer", name) for name in names)
    return StepGraph(
        tokens,
        seqs,
        seqs,
        launches.input_buffers((tokens, seqs, seqs), PAGES, samples=False),
        (
            Launch("counting-append", (tokens, 1, 1), tuple(Arg("buffer", n) for n in ("ids", "slots", KV)), ()),
            Launch("counting-digest", (seqs, 1, 1), (*pointers, Arg("i32", PAGES), Arg("i32", seqs)), (0,)),
            Launch(
                "counting-spread", (seqs, -(-VOCAB // WIDTH), 1), (Arg("buffer", "key"), Arg("buffer", "logits")), (1,)
            ),
        ),
    )


def launch_plan(sm: int, binaries: tuple[Binary, ...]) -> LaunchPlan:
    graphs = (step(1, 1), step(MAX_SEQS, MAX_SEQS), step(MAX_TOKENS, MAX_SEQS))
    key, logits = Buffer("key", "act", 0, 4 * MAX_SEQS), Buffer("logits", "act", 256, 4 * MAX_SEQS * VOCAB)
    shift = Buffer("shift", "weights", 256, 4)
    act, io = (-(-n // 256) * 256 for n in (256 + logits.nbytes, graphs[-1].input_span[1]))
    arenas = {"weights": 512, "kv": 0, "act": act, "io": io}
    buffers = (key, logits, shift, Buffer(KV, KV, 0, 0))
    return LaunchPlan(sm, binaries, buffers, arenas, graphs, "logits", PAGES)


def write_plan(root: Path, sm: int = 90) -> schema.Plan:
    """Writes the plan, compiled for an SM."""
    binaries = compile_kernels(KERNELS, sm, root / "kernels", sources=SOURCES)
    launches.save(root, launch_plan(sm, binaries))
    (root / "weights").mkdir()
    with Writer(root / "weights/rank0.safetensors", [("shift", "i32", (1,), 4)]) as file:
        file.write("shift", np.array([SHIFT], np.int32))
    program = schema.Program(launches.LAUNCHES, 0, 0, ("shift",))
    return store.seal(root, replace(PLAN, target=f"cuda:sm_{sm}{'a' if sm >= 90 else ''}", program=program))


def calls(gpu: Gpu) -> list[tuple[str, int]]:
    """Grows by every call of the driver from now on: its name, and the bytes of a copy."""
    found: list[tuple[str, int]] = []
    run = gpu.run

    def noted(doing: str, name: str, *args: Any) -> Any:
        found.append((name, int(args[2]) if name.startswith("cuMemcpy") else 0))
        return run(doing, name, *args)

    gpu.run = noted  # type: ignore[method-assign]
    return found


def batch(chunks: list[tuple[list[int], int, list[int]]]) -> Batch:
    """A step of (all tokens so far, how many of them are cached, pages) a sequence, with logits of each last token."""
    ids, positions, slots, start = [], [], [], [0]
    table = np.full((len(chunks), PAGES), 12345678, np.int32)  # what is past a sequence's pages must not be used
    for row, (tokens, cached, pages) in zip(table, chunks, strict=True):
        row[: len(pages)] = pages
        here = range(cached, len(tokens))
        ids += tokens[cached:]
        positions += here
        slots += [pages[p // BLOCK] * BLOCK + p % BLOCK for p in here]
        start.append(len(ids))
    ints = [np.array(x, np.int32) for x in (ids, positions, slots)]
    return Batch(*ints, table, np.array(start, np.int32), np.array(start[1:], np.int32) - 1)
