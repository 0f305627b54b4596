"""The plan's tokenizer/ folder goes in; text to token ids, ids to text, and messages to a prompt come out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import BPE

from planc.errors import PlancError
from planc.runtime.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from planc.runtime.errors import RequestError

if TYPE_CHECKING:
    from planc.runtime.template import ChatTemplate

LONG_TEXT = 8192  # characters; encoding more than this takes milliseconds
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Encodes and decodes as the model was trained, with exactly one BOS where the model wants one.

    config is tokenizer_config.json, generation is generation_config.json, template the chat template's source.
    """

    def __init__(
        self,
        raw: RawTokenizer,
        config: dict[str, Any] | None = None,
        generation: dict[str, Any] | None = None,
        template: str | None = None,
    ) -> None:
        self.raw = raw
        self.config = config or {}
        self.generation = generation or {}
        self.template_source = template
        self._bytes: dict[int, bytes] = {}
        raw.no_truncation()
        raw.no_padding()

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json and, where present, its config, generation config and chat template."""
        path = folder / "tokenizer.json"
        try:
            raw = RawTokenizer.from_file(str(path))
        except Exception as e:  # the tokenizers library raises nothing narrower
            raise PlancError(f"{path}: {e}. Rebuild the plan.") from e
        config = _read_json(folder / "tokenizer_config.json")
        return cls(raw, config, _read_json(folder / "generation_config.json"), _read_template(folder, config))

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """The named special tokens as text, for the chat template."""
        named = {name: _text(self.config.get(name)) for name in SPECIAL_TOKENS}
        return {name: text for name, text in named.items() if text is not None}

    @cached_property
    def bos_token_id(self) -> int | None:
        """The id that opens a prompt, if the model has one."""
        text = self.special_tokens.get("bos_token")
        found = self.raw.token_to_id(text) if text is not None else None
        return found if found is not None else self.generation.get("bos_token_id")

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a text: the generation config's, and the tokenizer's own."""
        ids = self.generation.get("eos_token_id")
        ids = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
        text = self.special_tokens.get("eos_token")
        own = self.raw.token_to_id(text) if text is not None else None
        return tuple(dict.fromkeys([*ids, *([] if own is None else [own])]))

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The compiled chat template; None when the model has none."""
        if self.template_source is None:
            return None
        from planc.runtime.template import ChatTemplate  # jinja2 takes 90 ms to import, completions need none of it

        return ChatTemplate(self.template_source, self.special_tokens)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of text. With add_special_tokens, what the model wants around a text, but never a second BOS."""
        if len(text) > LONG_TEXT:  # encode keeps other threads waiting to its end, encode_batch lets them run
            ids: list[int] = self.raw.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        else:
            ids = self.raw.encode(text, add_special_tokens=add_special_tokens).ids
        return self._one_bos(ids, text) if add_special_tokens else ids

    def check_fits(self, text: str, max_tokens: int, param: str) -> None:
        """Raise RequestError, without encoding it, when a text is too long for max_tokens of the longest token."""
        if len(text) <= LONG_TEXT or self.longest_token is None or len(text) <= max_tokens * self.longest_token:
            return
        raise RequestError(
            f"the text has {len(text)} characters, but the maximum context length is {max_tokens} tokens, each of at "
            f"most {self.longest_token} characters; shorten it",
            param=param,
            code="context_length_exceeded",
        )

    @cached_property
    def longest_token(self) -> int | None:
        """Characters that one token can stand for at most; None when an unknown token may swallow any number."""
        model: Any = self.raw.model
        one_by_one = isinstance(model, BPE) and not model.fuse_unk
        if not one_by_one and not getattr(model, "byte_fallback", False):
            return None
        return max(map(len, self.raw.get_vocab()), default=None)  # stand-ins for bytes are as many as the bytes

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids that the tokenizer does not know give nothing."""
        text: str = self.raw.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> Detokenizer:
        """What turns the tokens that follow `prompt` into text."""
        if type(self.raw.decoder).__name__ == "ByteLevel":
            return ByteDetokenizer(self._shown_bytes if skip_special_tokens else self.token_bytes)
        return WindowDetokenizer(partial(self.decode, skip_special_tokens=skip_special_tokens), prompt)

    def render_chat(self, messages: list[dict[str, Any]], /, **variables: Any) -> str:
        """The prompt text of a conversation. It holds its BOS: encode it with add_special_tokens=False."""
        if self.chat_template is None:
            raise RequestError("this model has no chat template; use /v1/completions", param="messages")
        return self.chat_template.render(messages, **variables)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; a token may hold a part of a character only."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._find_bytes(token)
        return found

    def _shown_bytes(self, token: int) -> bytes:
        return b"" if token in self._special else self.token_bytes(token)

    def _find_bytes(self, token: int) -> bytes:
        text: str | None = self.raw.id_to_token(token)
        if text is None:
            return b""
        if token in self._added:
            return text.encode()
        if self._byte_level:
            table = _byte_of_char()
            return bytes(table[c] for c in text) if all(c in table for c in text) else text.encode()
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes([int(text[3:5], 16)])
        return text.replace("\u2581", " ").encode()

    def token_text(self, token: int) -> str:
        """A token as text by itself; the broken bytes of a part of a character become U+FFFD."""
        return self.token_bytes(token).decode(errors="replace")

    def _one_bos(self, ids: list[int], text: str) -> list[int]:
        bos, wanted = self.bos_token_id, self.config.get("add_bos_token")
        if bos is None:
            return ids
        spelt = text.startswith(self.special_tokens.get("bos_token") or "\0")
        extra = 0
        while extra < len(ids) and ids[extra] == bos:
            extra += 1
        if extra and not spelt and wanted is False:
            return ids[1:]
        if extra == 0 and wanted is True:
            return [bos, *ids]
        return ids[1:] if extra > 1 and spelt else ids

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self.raw.get_added_tokens_decoder())

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(i for i, token in self.raw.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def _byte_level(self) -> bool:
        return "ByteLevel" in repr(self.raw.decoder)


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raise RequestError when a token id is outside [0, vocab_size)."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        token = next(token for token in ids if not 0 <= token < vocab_size)
        raise RequestError(f"prompt: token id {token} is outside [0, {vocab_size})", param="prompt")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise PlancError(f"{path}: {e}. Rebuild the plan.") from e
    if not isinstance(found, dict):
        raise PlancError(f"{path}: expected a JSON object, found {type(found).__name__}. Rebuild the plan.")
    return found


def _read_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):  # the older form: [{"name": "default", "template": "..."}, ...]
        found = {entry.get("name"): entry.get("template") for entry in found}.get("default")
    return found


def _text(token: object) -> str | None:
    """A special token is a string, or an object with its content."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """GPT-2's map from the printable stand-ins of byte-level BPE back to bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
