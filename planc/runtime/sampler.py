"""Token choice: one row of float32 logits and a sequence go in, the next token id comes out.

Order: penalties, bias, allowed and minimum-length masks, temperature, min_p, top_k, top_p, then one uniform number
from Philox keyed by (seed, sample) at counter = the new token's position. Every row is worked on by itself, so batch
mates, chunking, preemption and the row's place in the step change nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planc.runtime.sequence import SamplingParams, Sequence

Floats = NDArray[np.float32]
BLOCK = 256  # a running sum over a whole vocabulary is slow; one over block sums is not
_WORD = 2**64 - 1
FIRST_CANDIDATES = 256  # top_p looks at this many of the most likely tokens first; enough in nearly all cases


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities under the raw logits: of the chosen token, and of the k most likely, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class NotFinite(ValueError):
    """Logits that hold a NaN or leave no token possible: the position they are for, and the best of them."""

    def __init__(self, position: int, best: float) -> None:
        super().__init__(f"logits at position {position} are not finite (best is {best})")


def sample(logits: Floats, seq: Sequence, eos_token_ids: Collection[int]) -> int:
    """The next token of `seq` from its logits [vocab], which are not changed.

    Raises NotFinite when the logits hold a NaN or leave no token possible.
    """
    params = seq.params
    adjusted = _adjust(logits, seq, eos_token_ids)
    best = int(adjusted.argmax())  # the first of equals, and a NaN wins
    if not np.isfinite(adjusted[best]):
        raise NotFinite(len(seq.tokens), float(adjusted[best]))
    if params.greedy:
        return best
    scaled = (adjusted - adjusted[best]) / np.float32(params.temperature)
    return _draw(scaled, params, uniform(seq.seed, seq.sample, len(seq.tokens)))


def uniform(seed: int, sample: int, position: int) -> float:
    """The number in [0, 1) of a stream's position: Philox4x64-10 with key (seed, sample), counter position.

    It is what numpy's generator of that key and counter gives first; making one takes longer than the rounds do.
    """
    k0, k1 = seed & _WORD, sample & _WORD
    a, b, c, d = position + 1, 0, 0, 0
    for _ in range(10):
        x, y = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
        a, b, c, d = (y >> 64) ^ b ^ k0, y & _WORD, (x >> 64) ^ d ^ k1, x & _WORD
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & _WORD, (k1 + 0xBB67AE8584CAA73B) & _WORD
    return (a >> 11) * 2.0**-53


def logprobs_of(logits: Floats, token: int, count: int) -> TokenLogprobs:
    """Log probabilities of `token` and of the `count` most likely tokens under logits [vocab].

    Raises ValueError when the logits hold a NaN, or nothing finite.
    """
    peak = logits.max()
    if not np.isfinite(peak):
        raise ValueError(f"logits are not finite (best is {peak})")
    norm = float(peak) + float(np.log(np.exp(logits - peak).sum(dtype=np.float64)))
    top = _largest(logits, count) if count else ()
    return TokenLogprobs(token, float(logits[token]) - norm, tuple((int(t), float(logits[t]) - norm) for t in top))


def _adjust(logits: Floats, seq: Sequence, eos_token_ids: Collection[int]) -> Floats:
    params = seq.params
    too_early = seq.output_len < params.min_tokens
    if not (params.penalised or params.logit_bias or params.allowed_token_ids or too_early):
        return logits
    out = logits.copy()
    if params.penalised:
        _penalise(out, seq)
    for token, bias in params.logit_bias:
        out[token] += bias
    if params.allowed_token_ids:
        kept = list(params.allowed_token_ids)
        values = out[kept]
        out.fill(-np.inf)
        out[kept] = values
    if too_early:
        out[[*eos_token_ids, *params.stop_token_ids]] = -np.inf
    return out


def _penalise(out: Floats, seq: Sequence) -> None:
    """Repetition looks at prompt and output; presence and frequency at the output alone."""
    params = seq.params
    seen = np.unique(np.array(seq.tokens, np.int64))
    values = out[seen]
    penalty = np.float32(params.repetition_penalty)
    out[seen] = np.where(values > 0, values / penalty, values * penalty)
    if seq.output_len:
        tokens, counts = np.unique(np.array(seq.tokens[seq.prompt_len :], np.int64), return_counts=True)
        frequency, presence = (float(np.float32(p)) for p in (params.frequency_penalty, params.presence_penalty))
        out[tokens] -= (frequency * counts + presence).astype(np.float32)  # one rounding, as a GPU's fma


def _draw(scaled: Floats, params: SamplingParams, u: float) -> int:
    """A token from softmax(scaled), whose largest entry is 0, cut by min_p, top_k and top_p, at quantile u."""
    weights = np.exp(scaled)
    if params.min_p > 0:
        weights[weights < np.float32(params.min_p)] = 0
    if params.top_k <= 0 and params.top_p >= 1:
        return _at_quantile(weights, u)
    kept = _largest(weights, params.top_k) if params.top_k > 0 else _nucleus_candidates(weights, params.top_p)
    if params.top_p < 1:
        kept = kept[: _nucleus_size(weights[kept], params.top_p, None if params.top_k > 0 else weights)]
    return int(kept[_at_quantile(weights[kept], u)])


def _at_quantile(weights: Floats, u: float) -> int:
    """The index where the running sum of the weights passes u of their total: by block first, then inside it."""
    sums = np.add.reduceat(weights, np.arange(0, len(weights), BLOCK)).astype(np.float64).cumsum()
    block, rest = _passes(sums, u * sums[-1])
    inside = weights[block * BLOCK : (block + 1) * BLOCK].astype(np.float64).cumsum()
    return block * BLOCK + _passes(inside, rest)[0]


def _passes(cumulative: NDArray[np.float64], target: float) -> tuple[int, float]:
    """The first index whose running sum is above target, and the target less the sum before that index."""
    target = min(target, np.nextafter(cumulative[-1], 0))  # rounding may put the target at the total, past every weight
    at = int(cumulative.searchsorted(target, side="right"))
    return at, float(target - cumulative[at - 1]) if at else float(target)


def _nucleus_size(ordered: Floats, top_p: float, population: Floats | None) -> int:
    """How many of the ordered weights it takes to reach top_p of the population's (by default their own) sum."""
    cumulative = ordered.astype(np.float64).cumsum()
    total = cumulative[-1] if population is None else population.sum(dtype=np.float64)
    return int(cumulative.searchsorted(top_p * total, side="left")) + 1


def _nucleus_candidates(weights: Floats, top_p: float) -> NDArray[np.intp]:
    """Tokens by falling weight, enough of them to hold top_p of the whole."""
    need = top_p * weights.sum(dtype=np.float64)
    count = FIRST_CANDIDATES
    while True:
        kept = _largest(weights, count)
        if len(kept) == len(weights) or weights[kept].sum(dtype=np.float64) > need:
            return kept
        count *= 8


def _largest(values: Floats, count: int) -> NDArray[np.intp]:
    """Indices of the `count` largest values, falling; of equals the lower index comes first."""
    if count < len(values):
        threshold = np.partition(values, len(values) - count)[len(values) - count]
        candidates = np.flatnonzero(values >= threshold)
    else:
        candidates = np.arange(len(values))
    order = np.argsort(-values[candidates], kind="stable")
    return candidates[order][:count]
