"""How far a plan is from its model: in go a plan and the reference's logits, out come goldens and measured distances.

The plan generates, the reference judges: both see the same tokens, and only the reference's rows that are wanted are
held at a time.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from planc.plans.schema import Accuracy, Golden
from planc.runtime.goldens import Scorer

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Water boils at 100 degrees",
    "Once upon a time, in a village by the sea,",
)
GOLDEN_TOKENS = 16
EVAL_TEXT = Path(__file__).parent / "data" / "eval.txt"
EVAL_TOKENS = 1024
WINDOW = 256

Logits = Iterable[tuple[int, int, np.ndarray]]
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Material:
    """Token sequences to judge: the goldens (prompt and the plan's tokens), then windows of the evaluation text."""

    prompts: tuple[str, ...]
    prompt_ids: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[int, ...], ...]
    windows: tuple[tuple[int, ...], ...]

    @property
    def sequences(self) -> list[list[int]]:
        """All sequences in the order in which the reference must judge them."""
        goldens = [list(p + t) for p, t in zip(self.prompt_ids, self.tokens, strict=True)]
        return goldens + [list(w) for w in self.windows]


def generate(scorer: Scorer, encode: Encode, max_model_len: int) -> Material:
    """The plan's greedy tokens after each prompt, and the windows of the evaluation text that fit the model."""
    room = max(1, max_model_len - GOLDEN_TOKENS)
    ids = tuple(tuple(encode(p)[:room]) for p in PROMPTS)
    count = min(GOLDEN_TOKENS, max_model_len - 1)
    tokens = tuple(map(tuple, scorer.greedy(ids, count)))
    text = encode(EVAL_TEXT.read_text(encoding="utf-8"))[:EVAL_TOKENS]
    width = min(WINDOW, max_model_len)
    windows = tuple(tuple(text[i : i + width]) for i in range(0, len(text), width))
    return Material(PROMPTS, ids, tokens, tuple(w for w in windows if len(w) > 1))


def unjudged(material: Material) -> tuple[tuple[Golden, ...], Accuracy]:
    """Goldens without margins, for a build that skips the reference."""
    goldens = tuple(
        Golden(p, i, t, (), ()) for p, i, t in zip(material.prompts, material.prompt_ids, material.tokens, strict=True)
    )
    return goldens, Accuracy(reference="none")


def judge(
    material: Material, scorer: Scorer, reference: Logits, name: str, progress: Callable[[int], None]
) -> tuple[tuple[Golden, ...], Accuracy]:
    """Goldens with the reference's margins, and the distance over the windows; `progress` counts rows."""
    margins: list[list[float]] = [[] for _ in material.prompts]
    agrees: list[list[bool]] = [[] for _ in material.prompts]
    totals = _Totals()
    sequences = material.sequences
    for index, start, rows in reference:
        if index < len(material.prompts):
            _golden_rows(material, index, start, rows, margins[index], agrees[index])
        else:
            ids = sequences[index]
            totals.add(scorer.logits(ids[start : start + len(rows)], start), rows, ids[start + 1 :])
        progress(len(rows))
    goldens = tuple(
        Golden(prompt, material.prompt_ids[i], material.tokens[i], tuple(margins[i]), tuple(agrees[i]))
        for i, prompt in enumerate(material.prompts)
    )
    return goldens, totals.accuracy(name)


def _golden_rows(
    material: Material, index: int, start: int, rows: np.ndarray, margins: list[float], agrees: list[bool]
) -> None:
    """Takes the rows that predict a golden token: those from the prompt's last token on."""
    first = len(material.prompt_ids[index]) - 1
    tokens = material.tokens[index]
    for i, row in enumerate(rows, start - first):
        if 0 <= i < len(tokens):
            low, high = np.partition(row, -2)[-2:]
            margins.append(round(float(high - low), 2))
            agrees.append(bool(row.argmax() == tokens[i]))


class _Totals:
    """Sums over rows: KL(reference || plan), equal top tokens, and both negative log-likelihoods of the next token."""

    def __init__(self) -> None:
        self.rows = self.same = self.predicted = 0
        self.kl = self.nll = self.reference_nll = 0.0

    def add(self, plan: np.ndarray, reference: np.ndarray, following: list[int]) -> None:
        """Rows [n, vocab] of both, and the tokens that follow each row (fewer at the end of a sequence)."""
        p, q = log_softmax(reference), log_softmax(plan)
        self.rows += len(p)
        self.kl += float((np.exp(p) * (p - q)).sum())
        self.same += int((p.argmax(1) == q.argmax(1)).sum())
        after = np.asarray(following[: len(p)], np.int64)
        at = (np.arange(len(after)), after)
        self.predicted += len(after)
        self.nll -= float(q[at].sum())
        self.reference_nll -= float(p[at].sum())

    def accuracy(self, name: str) -> Accuracy:
        """The means, rounded to what is reproducible."""
        return Accuracy(
            reference=name,
            text_sha256=hashlib.sha256(EVAL_TEXT.read_bytes()).hexdigest(),
            tokens=self.rows,
            mean_kl=round(max(0.0, self.kl / self.rows), 7),
            top1_agreement=round(self.same / self.rows, 4),
            perplexity=_digits(float(np.exp(self.nll / self.predicted))),
            reference_perplexity=_digits(float(np.exp(self.reference_nll / self.predicted))),
        )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log probabilities over the last axis, in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True)))


def _digits(x: float) -> float:
    """Four digits: float32 sums in another order, on another CPU, differ far below that."""
    return float(f"{x:.4g}")
