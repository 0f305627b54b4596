"""Request bodies: JSON bytes go in, checked values and SamplingParams come out; every fault is a RequestError.

Sampling values are taken from the request; where it is silent, from the model's generation_config.json (SAMPLING_KEYS
of it); where that is silent too, from OpenAI's defaults (temperature 1, top_p 1, no top_k). This is vLLM's rule.
Fields that planc does not know are accepted, logged and ignored; fields that it knows and cannot honour yet are
refused when they ask for anything.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from planc.runtime.errors import RequestError
from planc.runtime.sequence import SAMPLING_KEYS, SamplingParams

log = logging.getLogger("planc.server")

MAX_SAMPLES = 128  # choices of one prompt
MAX_CHOICES = 1024  # prompts times n of one completion request
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions only

# Field -> the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "bad_words": (None, []),
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "length_penalty": (None, 1),
    "logprob_token_ids": (None,),
    "modalities": (None, ["text"]),
    "priority": (None, 0),
    "prompt_embeds": (None,),
    "prompt_logprobs": (None,),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none"),
    "tools": (None,),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
}

Body = TypeVar("Body", bound="_Body")


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


class StreamOptions(_Body):
    """What a stream carries beside the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(_Body):
    """What chat and completion requests have in common."""

    model: str | None = None
    n: int | None = 1
    best_of: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = False
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None

    @property
    def samples(self) -> int:
        """Choices asked for of each prompt."""
        return 1 if self.n is None else self.n

    def check(self) -> None:
        """Raise RequestError for combinations that make no sense, or that planc cannot honour."""
        if not 1 <= self.samples <= MAX_SAMPLES:
            raise RequestError(f"n is {self.n}; pass 1 to {MAX_SAMPLES}", param="n")
        if self.best_of not in (None, self.samples):
            raise RequestError("best_of other than n is not supported; leave it out", param="best_of")
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options needs stream to be true; set it, or leave them out", param="stream_options"
            )
        if self.cache_salt == "":
            raise RequestError("cache_salt is empty; leave it out", param="cache_salt")
        self._check_unsupported()

    def params(
        self,
        defaults: Mapping[str, float],
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        """The SamplingParams of the request; `defaults` are those of the model."""
        given = {name: getattr(self, name) for name in (*SAMPLING_KEYS, "presence_penalty", "frequency_penalty")}
        chosen = {**defaults, **{name: value for name, value in given.items() if value is not None}}
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            seed=self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            ignore_eos=bool(self.ignore_eos),
            skip_special_tokens=self.skip_special_tokens is not False,
            logit_bias=tuple((token, max(-100.0, min(bias, 100.0))) for token, bias in (self.logit_bias or {}).items()),
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            **chosen,
        )

    def _check_unsupported(self) -> None:
        for name, value in (self.model_extra or {}).items():
            if name not in _UNSUPPORTED:
                log.info("request field %r is unknown and ignored", name[:100])
            elif not any(value == neutral and type(value) is type(neutral) for neutral in _UNSUPPORTED[name]):
                raise RequestError(f"{name} is not supported; leave it out", param=name, code="unsupported")


class ChatMessage(_Body):
    """One turn; the template sees all its fields."""

    role: str
    content: str | list[dict[str, Any]] | None = None

    def as_template_input(self) -> dict[str, Any]:
        """The message with its text parts joined; RequestError for a part that is no text."""
        message = self.model_dump(exclude_unset=True)
        if isinstance(self.content, list):
            message["content"] = "\n".join(_text_part(part) for part in self.content)
        return message


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None

    def check(self) -> None:
        """As GenerationRequest, and the rules of chat."""
        super().check()
        if not self.messages:
            raise RequestError("messages is empty; send at least one message", param="messages")
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError(
                "top_logprobs needs logprobs to be true; set it, or leave them out", param="top_logprobs"
            )

    def template_variables(self) -> dict[str, Any]:
        """What the chat template gets beside the messages."""
        known = {"documents": self.documents, "reasoning_effort": self.reasoning_effort}
        variables = {name: value for name, value in known.items() if value is not None}
        variables |= self.chat_template_kwargs or {}
        variables.pop("tools", None)
        return {"add_generation_prompt": self.add_generation_prompt, **variables}

    def sampling(self, defaults: Mapping[str, float]) -> SamplingParams:
        """Without a limit the context's rest is used."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.params(defaults, limit, (self.top_logprobs or 0) if self.logprobs else None)


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Any
    echo: bool | None = False
    logprobs: int | None = None
    add_special_tokens: bool = True

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, all texts or all token ids; RequestError when they are neither, none, or too many."""
        prompt = self.prompt
        if isinstance(prompt, str) or _is_ids(prompt):
            prompt = [prompt]
        if not isinstance(prompt, list) or not (all(isinstance(p, str) for p in prompt) or all(map(_is_ids, prompt))):
            raise RequestError("prompt: send a string, token ids, or a list of either", param="prompt")
        if not prompt or not all(prompt):
            raise RequestError("the prompt is empty; send at least one token", param="prompt")
        if len(prompt) * self.samples > MAX_CHOICES:
            choices = len(prompt) * self.samples
            raise RequestError(
                f"{choices} choices (prompts times n) in one request; send at most {MAX_CHOICES}", param="prompt"
            )
        return prompt

    def sampling(self, defaults: Mapping[str, float], room: int) -> SamplingParams:
        """`room` is what the context holds after the longest prompt: the default of 16 tokens does not exceed it.

        With echo, logprobs cover the prompt too, and no token need be generated.
        """
        limit = max(1, min(DEFAULT_COMPLETION_TOKENS, room)) if self.max_tokens is None else self.max_tokens
        scored = (self.logprobs or 0) if self.echo and (self.logprobs is not None or limit == 0) else None
        return self.params(defaults, limit, self.logprobs, scored)


class TokenizeRequest(_Body):
    """POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class DetokenizeRequest(_Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a response: each prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_json(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def parse(kind: type[Body], body: bytes) -> Body:
    """The request of a JSON body. RequestError names the first field that is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as e:
        first = e.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        param = str(first["loc"][0]) if first["loc"] else None
        raise RequestError(f"{where}: {first['msg']}" if where else first["msg"], param=param) from None


def error_body(error: RequestError) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _text_part(part: dict[str, Any]) -> str:
    text = part.get("text")
    if part.get("type") not in ("text", "input_text") or not isinstance(text, str):
        raise RequestError(
            f"content part of type {part.get('type')!r}: this model reads text; send that", param="messages"
        )
    return text
