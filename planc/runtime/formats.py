"""Response bodies: outputs of a job's choices go in, OpenAI's chat and completion objects come out."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from planc.runtime.errors import RequestError
from planc.runtime.output import Output
from planc.runtime.protocol import StreamOptions, error_body
from planc.runtime.sampler import TokenLogprobs
from planc.runtime.stream import Frame, Job, event
from planc.runtime.tokenizer import Tokenizer

Entry = tuple[int, TokenLogprobs | None]  # a token and, but for the first of a prompt, its log probabilities
LEAST_LOGPROB = -9999.0  # JSON has no -inf; vLLM's stand-in


class Format:
    """What chat and completion responses have in common; a subclass says how a choice looks."""

    prefix = ""
    kind = ""
    chunk_kind = ""

    def __init__(self, model: str, fingerprint: str, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def opening(self, choices: int) -> list[dict[str, Any]]:
        """The choices of the chunks that come before any output."""
        raise NotImplementedError

    def piece(self, index: int, output: Output) -> dict[str, Any]:
        """One choice of a chunk."""
        raise NotImplementedError

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        """One choice of a response that is not streamed."""
        raise NotImplementedError

    def whole(self, job: Job, outputs: Sequence[Output]) -> dict[str, Any]:
        """A response that is not streamed. RequestError when a choice failed."""
        for output in outputs:
            if output.finish_reason == "error":
                raise RequestError(output.error or "the request failed", status=500)
        choices = [self.choice(index, output) for index, output in enumerate(outputs)]
        return {"object": self.kind, **self._head, "choices": choices, "usage": job.usage().as_json()}

    async def events(self, job: Job, choices: int, options: StreamOptions) -> AsyncIterator[bytes]:
        """A streamed response but for its last line; the events of one step are sent together."""
        head = {"object": self.chunk_kind, **self._head}
        frame = Frame(head, {"usage": None} if options.include_usage else {})
        for choice in self.opening(choices):
            yield frame.event(choice)
        async for batch in job.outputs():
            if options.include_usage and options.continuous_usage_stats:
                frame = Frame(head, {"usage": job.usage().as_json()})
            yield b"".join(self._event(frame, index, output) for index, output in batch)
        if options.include_usage:
            yield Frame(head, {"usage": job.usage().as_json()}).event()

    def _event(self, frame: Frame, index: int, output: Output) -> bytes:
        if output.finish_reason == "error":
            return event(error_body(RequestError(output.error or "the request failed", status=500)))
        return frame.event(self.piece(index, output))


class ChatFormat(Format):
    """chat.completion and chat.completion.chunk."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self, choices: int) -> list[dict[str, Any]]:
        """Each choice's role."""
        delta = {"role": "assistant", "content": ""}
        return [{"index": i, "delta": delta, "logprobs": None, "finish_reason": None} for i in range(choices)]

    def piece(self, index: int, output: Output) -> dict[str, Any]:
        """The text that is new."""
        delta = {"content": output.text} if output.text else {}
        return {"index": index, "delta": delta, **self._ending(output)}

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        """The whole message."""
        message = {"role": "assistant", "content": output.text, "refusal": None}
        return {"index": index, "message": message, **self._ending(output)}

    def _ending(self, output: Output) -> dict[str, Any]:
        content = [self._entry(entry) for entry in output.logprobs]
        logprobs = {"content": content, "refusal": None} if content else None
        return {"logprobs": logprobs, "finish_reason": output.finish_reason, "stop_reason": output.stop_reason}

    def _entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in entry.top]
        return {**self._token(entry.token, entry.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(raw)}


class CompletionFormat(Format):
    """text_completion, streamed or not. `echoes` are the prompts' texts, one a choice, or nothing; `scored` are their
    token ids when logprobs cover the prompts too.
    """

    prefix = "cmpl"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(
        self,
        model: str,
        fingerprint: str,
        tokenizer: Tokenizer,
        echoes: Sequence[str] = (),
        scored: Sequence[Sequence[int]] = (),
    ) -> None:
        super().__init__(model, fingerprint, tokenizer)
        self._echoes = echoes
        self._scored = scored
        self._offsets: dict[int, int] = {}

    def opening(self, choices: int) -> list[dict[str, Any]]:
        """The echoed prompts; those that are scored come with their first output."""
        if self._scored:
            return []
        return [self._choice(i, text, Output("")) for i, text in enumerate(self._echoes)]

    def piece(self, index: int, output: Output) -> dict[str, Any]:
        """The text that is new."""
        first = self._scored and index not in self._offsets
        return self._choice(index, (self._echoes[index] if first else "") + output.text, output)

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        """The whole text."""
        return self._choice(index, (self._echoes[index] if self._echoes else "") + output.text, output)

    def _choice(self, index: int, text: str, output: Output) -> dict[str, Any]:
        entries: list[Entry] = [(entry.token, entry) for entry in (*output.prompt_logprobs, *output.logprobs)]
        if self._scored and index not in self._offsets:
            entries.insert(0, (self._scored[index][0], None))
        logprobs = self._logprobs(index, entries) if entries else None
        ending = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
        return {"index": index, "text": text, "logprobs": logprobs, **ending}

    def _logprobs(self, index: int, entries: Sequence[Entry]) -> dict[str, Any]:
        """The older form of logprobs: parallel lists, offsets counted in characters of the tokens' own texts."""
        text_of = self._tokenizer.token_text
        tokens = [text_of(token) for token, _ in entries]
        offsets = [self._offsets.get(index, 0)]
        for token in tokens:
            offsets.append(offsets[-1] + len(token))
        self._offsets[index] = offsets.pop()
        top = [entry and self._by_text(entry) for _, entry in entries]
        values = [entry and max(entry.logprob, LEAST_LOGPROB) for _, entry in entries]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}

    def _by_text(self, entry: TokenLogprobs) -> dict[str, float]:
        """The chosen token and the most likely; parts of characters that look alike are told by bytes."""
        found: dict[str, float] = {}
        for token, logprob in dict([(entry.token, entry.logprob), *entry.top]).items():
            text = self._tokenizer.token_text(token)
            if text in found:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._tokenizer.token_bytes(token))
            found.setdefault(text, max(logprob, LEAST_LOGPROB))
        return found
