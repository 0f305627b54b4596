"""A request's state: SamplingParams (frozen, validated) and Sequence, the one mutable type of planc."""

from __future__ import annotations

import enum
import logging
import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from planc.runtime.errors import RequestError

GREEDY_BELOW = 1e-5  # a temperature under this is greedy, as in vLLM: dividing by it would overflow float32 logits
MAX_STOP_STRINGS = 64
MAX_LOGPROBS = 20  # OpenAI's bound for top_logprobs
MAX_SEED = 2**63
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # that a model may give defaults for

log = logging.getLogger("planc.engine")


class Status(enum.Enum):
    """Where a sequence stands: queued (new or preempted), holding pages, or done."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one sequence picks its tokens and when it stops.

    top_k 0 or -1 means all tokens; logprobs None means none, k means the chosen token and the k most likely.
    prompt_logprobs is the same for each prompt token but the first; only with it may max_tokens be 0.
    max_tokens None means as many as the context still holds (the engine fills it in).
    Raises RequestError naming the field when a value is out of range.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, low, high, open_low in _RANGES:
            _check_range(name, getattr(self, name), low, high, open_low)
        if self.prompt_logprobs is None:
            _check_range("max_tokens", self.max_tokens, 1, math.inf, False)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}; lower it", param="min_tokens"
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop: {len(self.stop)} strings; send at most {MAX_STOP_STRINGS}", param="stop")
        if any(not text for text in self.stop):
            raise RequestError("stop: an empty string stops nothing; leave it out", param="stop")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids is empty: no token could be chosen; leave it out", param="allowed_token_ids"
            )
        if any(not math.isfinite(bias) for _, bias in self.logit_bias):
            raise RequestError("logit_bias: send finite numbers only", param="logit_bias")

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def penalised(self) -> bool:
        """True when tokens already seen change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def check_vocab(self, vocab_size: int) -> None:
        """Raise RequestError when a token id named by a parameter is outside [0, vocab_size)."""
        for name, ids in (
            ("logit_bias", [token for token, _ in self.logit_bias]),
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
        ):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise RequestError(f"{name}: token id {token} is outside [0, {vocab_size})", param=name)


# field, lowest, highest, whether the lowest itself is refused
_RANGES: tuple[tuple[str, float, float, bool], ...] = (
    ("max_tokens", 0, math.inf, False),
    ("min_tokens", 0, math.inf, False),
    ("temperature", 0, 1e30, False),  # float32 logits stay finite under this and the next bounds
    ("top_k", -1, math.inf, False),
    ("top_p", 0, 1, True),
    ("min_p", 0, 1, False),
    ("repetition_penalty", 1e-6, 1e6, False),
    ("presence_penalty", -2, 2, False),
    ("frequency_penalty", -2, 2, False),
    ("seed", -MAX_SEED, MAX_SEED - 1, False),
    ("logprobs", 0, MAX_LOGPROBS, False),
    ("prompt_logprobs", 0, MAX_LOGPROBS, False),
)


def _check_range(name: str, value: float | None, low: float, high: float, open_low: bool) -> None:
    if value is None:
        return
    inside = low < value <= high if open_low else low <= value <= high
    if not (inside and math.isfinite(value)):
        bounds = f"{'(' if open_low else '['}{low}, {'inf)' if high == math.inf else f'{high}]'}"
        raise RequestError(f"{name} is {value}, expected a value in {bounds}", param=name)


def model_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling values of a generation_config.json; those that no SamplingParams takes are logged and left out."""
    found: dict[str, Any] = {}
    for name in SAMPLING_KEYS:
        value = generation_config.get(name)
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
        except (RequestError, TypeError):
            log.warning("generation_config.json: %s is %r, which is no valid default; ignored", name, value)
        else:
            found[name] = value
    return found


@dataclass(slots=True)
class Times:
    """Monotonic seconds of a sequence's milestones; None until reached. Preemption resets none of them."""

    arrival: float = 0.0
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None


@dataclass(eq=False, slots=True)
class Sequence:
    """One stream of tokens: its prompt, what was generated, its pages and its status.

    tokens holds prompt then output; computed counts the leading tokens whose keys and values are in the cache;
    cached counts those that the prefix cache gave at the first admission. scored counts the prompt tokens whose
    successors have their log probabilities, when those were asked for. seed and sample key the random stream.
    """

    id: int
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    seed: int = 0
    sample: int = 0
    salt: bytes = b""
    status: Status = Status.WAITING
    pages: array[int] = field(default_factory=lambda: array("i"))
    digests: list[bytes] = field(default_factory=list)
    computed: int = 0
    scored: int = 0
    cached: int | None = None
    preemptions: int = 0
    times: Times = field(default_factory=Times)

    @property
    def output_len(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def wanted(self) -> int:
        """Position of the first token whose logits are still wanted: the last one, unless the prompt is scored."""
        last = len(self.tokens) - 1
        return last if self.params.prompt_logprobs is None or self.scored >= self.prompt_len - 1 else self.scored

    @property
    def pending(self) -> int:
        """Tokens known but not yet in the cache; 1 means the sequence decodes, more that it prefills."""
        return len(self.tokens) - self.computed
