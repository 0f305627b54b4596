"""Real weights: greedy tokens equal transformers' in float32, and what narrow weights cost stays within bounds."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch

from planc.compiler.accuracy import EVAL_TEXT, log_softmax
from planc.compiler.build import BuildRequest, build
from planc.compiler.progress import Progress
from planc.compiler.reference import reference_logits
from planc.compiler.source import open_source
from planc.plans import store
from planc.runtime.cpu import CpuExecutor
from planc.runtime.goldens import Scorer
from planc.runtime.tokenizer import Tokenizer

pytestmark = pytest.mark.real
MODELS = ("smollm2-135m", "gemma3-270m")
SOME = [MODELS[0], pytest.param(MODELS[1], marks=pytest.mark.slow)]
PROMPTS = (
    "The capital of France is",
    "def quicksort(values):\n    ",
    "In 1969, three astronauts",
    "The recipe for a good soup begins with",
    "Once upon a time there was a",
    "The square root of 144 is",
    "Dear Sir or Madam,\n\n",
    "La ville de Paris est",
)
TIE = 1e-4  # a top-2 margin of the reference below which float32 may choose either token
MAX_KL_RATIO = 1.5  # of bf16, to that of transformers in bf16


@pytest.fixture(scope="module")
def scorer(tmp_path_factory) -> Callable[[str, str], tuple[Scorer, Tokenizer]]:
    """A plan's scorer by model and dtype."""

    @cache
    def make(model: str, dtype: str) -> tuple[Scorer, Tokenizer]:
        out = tmp_path_factory.mktemp("real") / "plan"
        request = BuildRequest(model, out, dtype=dtype, reference="none", max_model_len=2048)
        with Progress(quiet=True) as progress:
            build(request, progress)
        plan = store.load(out)
        executor = CpuExecutor(out, plan, 64, 2)
        return Scorer(executor, plan.limits.max_num_seqs, 64), Tokenizer.load(out / "tokenizer")

    return make


@pytest.mark.parametrize("model", SOME)
def test_greedy_tokens_equal_transformers_in_float32(scorer, model: str) -> None:
    plan, tokenizer = scorer(model, "f32")
    prompts = [tokenizer.encode(p) for p in PROMPTS]
    tokens = plan.greedy(prompts, 64)
    wrong = []
    with open_source(model) as source:
        sequences = [p + t for p, t in zip(prompts, tokens, strict=True)]
        for index, start, rows in reference_logits(source, sequences, rows_per_chunk=16):
            for i, row in enumerate(rows, start + 1 - len(prompts[index])):
                if 0 <= i < 64:
                    second, first = np.partition(row, -2)[-2:]
                    if row.argmax() != tokens[index][i] and first - second >= TIE:
                        wrong.append((PROMPTS[index], i))
    assert wrong == []


@pytest.fixture(scope="module")
def text_ids(scorer) -> Callable[[str], list[list[int]]]:
    """Two windows of 128 tokens of the evaluation text."""

    def make(model: str) -> list[list[int]]:
        ids = scorer(model, "f32")[1].encode(EVAL_TEXT.read_text())
        return [ids[:128], ids[512:640]]

    return make


def mean_kl(reference, other) -> float:
    """KL(reference || other) in nats, the mean over rows; both are lists of [n, vocab]."""
    total = rows = 0
    for p, q in zip(map(log_softmax, reference), map(log_softmax, other), strict=True):
        total += float((np.exp(p) * (p - q)).sum())
        rows += len(p)
    return total / rows


def reference_rows(model: str, sequences: list[list[int]], dtype: torch.dtype) -> list[np.ndarray]:
    with open_source(model) as source:
        return [rows.copy() for _, _, rows in reference_logits(source, sequences, rows_per_chunk=16, dtype=dtype)]


@pytest.mark.parametrize("model", SOME)
def test_narrow_weights_cost_little(scorer, text_ids, model: str, record_property) -> None:
    sequences = text_ids(model)
    truth = reference_rows(model, sequences, torch.float32)
    theirs = mean_kl(truth, reference_rows(model, sequences, torch.bfloat16))
    dtypes = ("f32", "auto", "bf16", "int8-wo")  # auto: the codes of the file
    ours = {d: mean_kl(truth, split(scorer(model, d)[0], sequences, truth)) for d in dtypes}
    for name, value in (*ours.items(), ("transformers bf16", theirs)):
        record_property(f"{model} {name} mean KL", value)
        print(f"{model} {name}: mean KL {value:.3g}")
    assert ours["f32"] < 1e-7
    assert ours["auto"] <= 2e-4 + ours["bf16"]
    assert ours["bf16"] <= MAX_KL_RATIO * theirs
    assert 1e-6 < ours["int8-wo"] < 0.02


def split(plan: Scorer, sequences: list[list[int]], like: list[np.ndarray]) -> list[np.ndarray]:
    """The plan's logits cut as the reference's."""
    whole = np.concatenate([plan.logits(s, 0) for s in sequences])
    return np.split(whole, np.cumsum([len(r) for r in like])[:-1])
