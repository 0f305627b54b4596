"""A whole plan directory around a model of forty lines of C: it reads ids back through page table and slots."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from planc.plans import schema, store
from planc.plans.tensors import Writer
from planc.runtime.tokenizer import Tokenizer
from tests.runtime.fake import TEMPLATE, tiny_tokenizer

VOCAB, BLOCK, MAX_LEN, MAX_SEQS, MAX_TOKENS = 300, 16, 128, 4, 32
LOGITS_OFFSET = 256

SOURCE = r"""
#include <stdint.h>
#include <stdlib.h>
enum { VOCAB = 300, BLOCK = 16, LOGITS_OFFSET = 256 };
typedef struct { int32_t num_tokens, num_seqs, num_rows, table_stride;
                 const int32_t *ids, *positions, *slots, *page_table, *query_start, *logit_rows; } planc_batch;
typedef struct { const int32_t* shift; char* arena; int32_t* kv; int threads; } model;
void* planc_open(const void* const* weights, int32_t num_weights, void* arena, void* kv, int32_t num_threads) {
  if (num_weights != 2 || num_threads > 1000) return 0;
  if ((uintptr_t)weights[0] % 64 || (uintptr_t)weights[1] % 64 || (uintptr_t)arena % 64 || (uintptr_t)kv % 64) return 0;
  model* m = malloc(sizeof *m);
  m->shift = weights[1]; m->arena = arena; m->kv = kv; m->threads = num_threads;
  return m;
}
int planc_step(void* handle, const planc_batch* b) {
  model* m = handle;
  for (int t = 0; t < b->num_tokens; t++) { if (b->ids[t] == 7) return 3; m->kv[b->slots[t]] = b->ids[t]; }
  float* logits = (float*)(m->arena + LOGITS_OFFSET);
  for (int r = 0; r < b->num_rows; r++) {
    int row = b->logit_rows[r], s = 0;
    while (b->query_start[s + 1] <= row) s++;
    uint32_t sum = m->shift[0];
    for (int p = 0; p <= b->positions[row]; p++)
      sum = sum * 31 + m->kv[b->page_table[s * b->table_stride + p / BLOCK] * BLOCK + p % BLOCK];
    for (int v = 0; v < VOCAB; v++) logits[r * VOCAB + v] = v == 10 + sum % (VOCAB - 10);
  }
  return 0;
}
void planc_close(void* handle) { free(handle); }
"""
SHIFT = 12345


def expected(prompt: list[int], count: int) -> list[int]:
    """What that model says, greedily."""
    tokens = list(prompt)
    for _ in range(count):
        total = SHIFT
        for token in tokens:
            total = (total * 31 + token) % 2**32
        tokens.append(10 + total % (VOCAB - 10))
    return tokens[len(prompt) :]


_scratch = tempfile.TemporaryDirectory(prefix="planc-test-")  # goes when the process does


@functools.cache
def _library() -> Path:
    folder = Path(_scratch.name)
    (folder / "model.c").write_text(SOURCE)
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler, "these tests need a C compiler"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", "model.so", "model.c"], cwd=folder, check=True)
    return folder / "model.so"


def write_plan(root: Path, **changes: object) -> schema.Plan:
    """Write the plan into `root`; `changes` replace fields of the manifest."""
    for name in ("kernels", "weights", "tokenizer"):
        (root / name).mkdir(parents=True, exist_ok=True)
    shutil.copy(_library(), root / "kernels/model.so")
    with Writer(root / "weights/rank0.safetensors", [("other", "i32", (3,), 12), ("shift", "i32", (1,), 4)]) as file:
        file.write("other", np.zeros(3, np.int32))
        file.write("shift", np.array([SHIFT], np.int32))
    write_tokenizer(root / "tokenizer", tiny_tokenizer(VOCAB))
    return store.seal(root, replace(PLAN, **changes))


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    tokenizer.raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer.config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "temperature": 0.0}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


PLAN = schema.Plan(
    model=schema.ModelInfo("tiny", "Tiny", "tiny", "f" * 64, 1, 1, 0, (1,)),
    target="cpu:portable",
    options=schema.Options("f32", "f32", BLOCK, "pack", 0),
    limits=schema.Limits(MAX_LEN, MAX_SEQS, MAX_TOKENS, VOCAB),
    kv=schema.KVLayout("f32", BLOCK, BLOCK * 4, ()),
    memory=schema.Memory(16, 0, 8192, 4, 2048),
    program=schema.Program("kernels/model.so", LOGITS_OFFSET + MAX_SEQS * VOCAB * 4, LOGITS_OFFSET, ("other", "shift")),
    kernels=(),
    weight_files=("weights/rank0.safetensors",),
    goldens=(),
    goldens_target=None,
    accuracy=schema.Accuracy("none"),
    passes=(),
    made_with={},
)
