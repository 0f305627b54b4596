"""The chat template: messages go in, the prompt text comes out. jinja2's sandbox with transformers' extras."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from planc.errors import PlancError
from planc.runtime.errors import RequestError


class ChatTemplate:
    """A compiled chat template and the special tokens (bos_token, eos_token, ...) that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except TemplateError as e:
            raise PlancError(f"chat template: {e}. Correct the plan's tokenizer/chat_template.jinja.") from e
        self._special_tokens = dict(special_tokens)

    def render(self, messages: list[dict[str, Any]], /, **variables: Any) -> str:
        """The prompt of a conversation. RequestError with the template's own message when it refuses the messages."""
        values = {"add_generation_prompt": True, "tools": None, "documents": None, **self._special_tokens, **variables}
        try:
            return self._template.render({**values, "messages": messages})
        except Exception as e:
            raise RequestError(f"the chat template refused the messages: {e}", param="messages") from e


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; serving renders its body as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own spelling

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: jinja2's own filter escapes <, > and & for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
