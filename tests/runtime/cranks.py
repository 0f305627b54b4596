"""The plan of cplan.py for two ranks: its C model joins what the weights of both hold, and says which rank may fail."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from planc.plans import schema, store
from planc.plans.tensors import Writer
from tests.runtime.cplan import (
    LOGITS_OFFSET,
    MAX_LEN,
    MAX_SEQS,
    MAX_TOKENS,
    PLAN,
    SHIFT,
    SOURCE,
    VOCAB,
    write_tokenizer,
)
from tests.runtime.fake import tiny_tokenizer

PARTS = (12000, SHIFT - 12000)  # the ranks' weights
FATAL = 8  # a token at which rank 1 ends
_GROUP = r"""
#include <sched.h>
#include <unistd.h>
static struct { uint32_t failed, arrived, phase, pad, parts[4]; } *group;
static int rank;
int64_t planc_group_bytes(void) { return 40; }
int planc_join(void* handle, void* memory, int32_t own, int32_t members) {
  group = memory; rank = own;
  return !handle || members < 2;
}
static int join_parts(const int32_t* ids, int count, uint32_t* total) {
  if (group->failed) return 2;
  for (int t = 0; rank == 1 && t < count; t++) if (ids[t] == 8) _exit(3);
  uint32_t phase = __atomic_load_n(&group->phase, __ATOMIC_ACQUIRE);
  group->parts[2 * (phase & 1) + rank] = *total;
  if (__atomic_add_fetch(&group->arrived, 1, __ATOMIC_ACQ_REL) == 2) {
    group->arrived = 0;
    __atomic_store_n(&group->phase, phase + 1, __ATOMIC_RELEASE);
  }
  while (__atomic_load_n(&group->phase, __ATOMIC_ACQUIRE) == phase) {
    if (__atomic_load_n(&group->failed, __ATOMIC_ACQUIRE)) return 2;
    sched_yield();
  }
  *total = group->parts[2 * (phase & 1)] + group->parts[2 * (phase & 1) + 1];
  return 0;
}
"""
_scratch = tempfile.TemporaryDirectory(prefix="planc-test-")


def _source() -> str:
    head, open_, rest = SOURCE.partition("void* planc_open")
    rest = rest.replace("model* m = handle;", "model* m = handle;\n  uint32_t shift = m->shift[0];", 1)
    rest = rest.replace(
        "float* logits =",
        "int bad = join_parts(b->ids, b->num_tokens, &shift);\n  if (bad) return bad;\n  float* logits =",
        1,
    )
    return head + _GROUP + open_ + rest.replace("uint32_t sum = m->shift[0];", "uint32_t sum = shift;")


@functools.cache
def _library() -> Path:
    folder = Path(_scratch.name)
    (folder / "model.c").write_text(_source())
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler, "these tests need a C compiler"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", "model.so", "model.c"], cwd=folder, check=True)
    return folder / "model.so"


def write_ranked_plan(root: Path) -> schema.Plan:
    """Write the plan into `root`, with a file of weights for each rank."""
    for name in ("kernels", "weights", "tokenizer"):
        (root / name).mkdir(parents=True, exist_ok=True)
    shutil.copy(_library(), root / "kernels/model.so")
    files = tuple(schema.rank_file(r) for r in range(2))
    for name, part in zip(files, PARTS, strict=True):
        with Writer(root / name, [("other", "i32", (3,), 12), ("shift", "i32", (1,), 4)]) as file:
            file.write("other", np.zeros(3, np.int32))
            file.write("shift", np.array([part], np.int32))
    write_tokenizer(root / "tokenizer", tiny_tokenizer(VOCAB))
    limits = schema.Limits(MAX_LEN, MAX_SEQS, MAX_TOKENS, VOCAB, ranks=2)
    program = replace(PLAN.program, arena_bytes=LOGITS_OFFSET + MAX_SEQS * VOCAB * 4)
    return store.seal(root, replace(PLAN, limits=limits, program=program, weight_files=files))
