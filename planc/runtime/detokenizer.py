"""Text as it grows: one token id at a time goes in, text that will never change comes out; stop strings cut it."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

Decode = Callable[[list[int]], str]
REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 6  # prompt tokens that tell the decoder whether a leading space belongs to the output
MAX_HELD_TOKENS = 64  # no character needs this many tokens; output that stays broken so long is let go as it is


class Detokenizer(Protocol):
    """Text of a growing sequence. The concatenation of all that `push` and `flush` return is its whole text."""

    def push(self, token: int) -> str:
        """Add a token; return the text that it completes, often one word, sometimes nothing."""
        ...

    def flush(self) -> str:
        """The held text, broken as it may be; the sequence is over."""
        ...


class ByteDetokenizer:
    """For tokens that are plain bytes (byte-level BPE): exact, and much faster than windows."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Add a token."""
        return self._decoder.decode(self._token_bytes(token))

    def flush(self) -> str:
        """The bytes of a character that did not become whole, as U+FFFD."""
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """Decodes a growing sequence by windows that start where text was whole.

    The concatenation of all that `push` and `flush` return equals decode(prompt + output) less decode(prompt), except
    that a prompt that ends inside a character gives the output no context. Broken bytes are held until they become a
    character, or until `flush`.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(prompt[-CONTEXT_TOKENS:])  # the window: context, whose text is out, then held tokens
        if self._ids and decode(self._ids).endswith(REPLACEMENT):
            self._ids = []
        self._context = len(self._ids)

    def push(self, token: int) -> str:
        """Add a token."""
        self._ids.append(token)
        text, held = self._new_text(), len(self._ids) - self._context
        if held < MAX_HELD_TOKENS and (not text or text.endswith(REPLACEMENT)):
            return ""
        if text:
            del self._ids[: self._context]
            self._context = held
        else:  # so many tokens without text are special ones that the decoder skips
            del self._ids[self._context :]
        return text

    def flush(self) -> str:
        """The text of the held tokens."""
        text = self._new_text()
        self._context = len(self._ids)
        return text

    def _new_text(self) -> str:
        known = self._decode(self._ids[: self._context])
        return self._decode(self._ids)[len(known) :]


class StopStrings:
    """Lets text through up to the first stop string; holds back a suffix that may yet become one.

    The match that ends first wins (of those, the one that starts first), so that the cut does not depend on how the
    text was divided. `matched` is the stop string once found.
    """

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        self._stops = stops
        self._keep = keep
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Add text; return what can be shown now. After a match it returns nothing more."""
        if self.matched is not None or not self._stops:
            return "" if self.matched is not None else text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, at, self.matched = min(found)
            self._held = ""
            return text[: end if self._keep else at]
        keep = self._suffix(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The held text, which became no stop string; the sequence is over."""
        text, self._held = self._held, ""
        return text

    def _suffix(self, text: str) -> int:
        """Length of the longest suffix of text that a stop string could go on from."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stops)), 0)
