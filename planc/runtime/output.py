"""What a client sees of a sequence: sampled tokens go in, text that will not change and the reason to stop come out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from planc.runtime.detokenizer import StopStrings
from planc.runtime.sampler import TokenLogprobs
from planc.runtime.sequence import Sequence
from planc.runtime.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Output:
    """A piece of a sequence's output, or (after `merge`) all of it.

    finish_reason is None while the sequence runs, then stop, length, abort or error (with `error` saying what);
    stop_reason is the stop token id or stop string that ended it. completion_tokens counts the whole output so far.
    prompt_logprobs, when asked for, are those of the prompt from its second token on; they come with the first piece.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


Sink = Callable[[Output], None]


def merge(outputs: Iterable[Output]) -> Output:
    """All pieces of one sequence as one."""
    pieces = list(outputs)
    last = pieces[-1]
    return Output(
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.token_ids),
        tuple(entry for piece in pieces for entry in piece.logprobs),
        last.finish_reason,
        last.stop_reason,
        last.error,
        last.prompt_tokens,
        last.completion_tokens,
        last.cached_tokens,
        tuple(entry for piece in pieces for entry in piece.prompt_logprobs),
    )


class OutputWriter:
    """Turns the tokens of one sequence into Outputs, and decides when the sequence ends."""

    def __init__(self, seq: Sequence, tokenizer: Tokenizer, eos_token_ids: Collection[int]) -> None:
        params = seq.params
        self._seq = seq
        self._eos = () if params.ignore_eos else eos_token_ids
        prompt = seq.tokens[: seq.prompt_len]
        self._detokenizer = tokenizer.detokenizer(prompt, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopStrings(params.stop, keep=params.include_stop_str_in_output)
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []

    def scored(self, logprobs: TokenLogprobs) -> None:
        """Keep those of the next prompt token for the first output."""
        self._prompt_logprobs.append(logprobs)

    def push(self, token: int, logprobs: TokenLogprobs | None) -> Output | None:
        """The output after `token`, which is already in the sequence; None while its text is held back."""
        self._tokens.append(token)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        reason, stop = self._ends_at(token)
        hidden = reason == "stop" and not self._seq.params.include_stop_str_in_output
        text = "" if hidden else self._show(self._detokenizer.push(token))
        if reason is not None and self._stops.matched is None:
            text += self._show(self._detokenizer.flush()) + self._stops.flush()
        if self._stops.matched is not None:
            reason, stop = "stop", self._stops.matched
        return self._output(text, reason, stop) if text or reason else None

    def finish(self, reason: str, error: str | None = None) -> Output:
        """The last output of a sequence that something outside it ended."""
        text = self._show(self._detokenizer.flush()) + self._stops.flush() if error is None else ""
        return self._output(text, reason, None, error)

    def _ends_at(self, token: int) -> tuple[str | None, int | str | None]:
        """Stop tokens need no look at min_tokens: the sampler gives none before it."""
        params = self._seq.params
        if token in params.stop_token_ids:
            return "stop", token
        if token in self._eos:
            return "stop", None
        full = params.max_tokens is not None and self._seq.output_len >= params.max_tokens
        return ("length" if full else None), None

    def _show(self, text: str) -> str:
        """Before min_tokens no stop string counts."""
        return text if self._seq.output_len < self._seq.params.min_tokens else self._stops.push(text)

    def _output(self, text: str, reason: str | None, stop: int | str | None, error: str | None = None) -> Output:
        tokens, logprobs, prompt = tuple(self._tokens), tuple(self._logprobs), tuple(self._prompt_logprobs)
        self._tokens.clear()
        self._logprobs.clear()
        self._prompt_logprobs.clear()
        seq = self._seq
        cached = seq.cached or 0
        return Output(text, tokens, logprobs, reason, stop, error, seq.prompt_len, seq.output_len, cached, prompt)
