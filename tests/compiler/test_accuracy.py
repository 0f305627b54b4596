"""Measured distances against torch's own, and what a judge of several plans works out once."""

from pathlib import Path

import numpy as np
import pytest
import torch

from planc.compiler import accuracy
from planc.compiler.reference import Judge, StreamedModel
from planc.compiler.source import open_source
from tests.models import tiny

VOCAB = 50
RNG = np.random.default_rng(0)


class Plan:
    """A scorer whose logits are known: of a sequence's positions, whatever its tokens."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    def greedy(self, prompts, count):
        return [[int(row.argmax()) for row in self.rows[len(p) - 1 : len(p) - 1 + count]] for p in prompts]

    def logits(self, ids, start):
        return self.rows[start : start + len(ids)]


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_distances_are_torchs(chunk: int) -> None:
    truth = RNG.standard_normal((64, VOCAB)).astype(np.float32) * 3
    plan = Plan(truth + RNG.standard_normal((64, VOCAB)).astype(np.float32))
    material = accuracy.generate(plan, lambda text: [b % VOCAB for b in text.encode()][:90], max_model_len=64)
    assert [len(w) for w in material.windows] == [64, 26]
    chunks = [
        (index, at, truth[at : at + chunk][: len(ids) - at])
        for index, ids in enumerate(material.sequences)
        for at in range(0, len(ids), chunk)
    ]
    seen: list[int] = []
    goldens, found = accuracy.judge(material, plan, chunks, "truth", seen.append)
    assert sum(seen) == sum(map(len, material.sequences))
    p = torch.cat([torch.from_numpy(truth[: len(w)]).double().log_softmax(-1) for w in material.windows])
    q = torch.cat([torch.from_numpy(plan.rows[: len(w)]).double().log_softmax(-1) for w in material.windows])
    kl = torch.nn.functional.kl_div(q, p, log_target=True, reduction="batchmean")
    assert found.mean_kl == pytest.approx(float(kl), rel=1e-5)
    assert found.top1_agreement == pytest.approx(float((p.argmax(1) == q.argmax(1)).double().mean()), abs=1e-4)
    assert found.tokens == 90
    following = [torch.tensor(w[1:]) for w in material.windows]
    for logp, figure in ((p, found.reference_perplexity), (q, found.perplexity)):
        parts = logp.split([len(w) for w in material.windows])
        picked = torch.cat([part[:-1].gather(1, f[:, None]) for part, f in zip(parts, following, strict=True)])
        assert figure == pytest.approx(float((-picked.mean()).exp()), rel=1e-3)
    for golden in goldens:
        first = len(golden.prompt_ids) - 1
        rows = np.sort(truth[first : first + len(golden.tokens)], axis=1)
        assert golden.margins == pytest.approx((rows[:, -1] - rows[:, -2]).tolist(), abs=0.006)
        best = truth[first : first + len(golden.tokens)].argmax(1).tolist()
        assert golden.reference_agrees == tuple(a == b for a, b in zip(best, golden.tokens, strict=True))


def test_a_judge_works_out_each_sequence_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    real = StreamedModel.hidden
    monkeypatch.setattr(
        StreamedModel, "hidden", lambda self, ids, limit=None: asked.append(tuple(ids.shape)) or real(self, ids, limit)
    )
    windows = [[5, 9, 200, 4, 7, 8], [17, 3, 3]]
    with open_source(str(tiny("llama", tmp_path, tokenizer=False))) as source:
        judge = Judge(source, rows_per_chunk=4)
        first = list(judge.logits([[1, 2, 3], *windows]))
        second = list(judge.logits([[1, 2, 4, 5], *windows]))
        third = list(judge.logits(windows))
    assert asked == [(3, 6), (1, 4)]
    of = lambda found, index: np.concatenate([rows for i, _, rows in found if i == index])  # noqa: E731
    for n in range(2):
        assert (of(first, n + 1) == of(second, n + 1)).all()
        assert (of(first, n + 1) == of(third, n)).all()
        assert of(first, n + 1).shape == (len(windows[n]), 330)
    assert not np.array_equal(of(first, 0)[-1], of(second, 0)[2])
