"""The text that calibration runs: in goes a file or `builtin`, out come windows of tokens and what the manifest says.

A file is text, or one JSON object a line: {"text": ..}, {"prompt": .., "completion": ..} or {"messages": [..]}, which
go through the model's chat template.
"""

import hashlib
import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from planc.errors import PlancError
from planc.runtime.errors import RequestError
from planc.runtime.tokenizer import Tokenizer

BUILTIN = "builtin"
FILE = Path(__file__).parents[1] / "data" / "calib.txt"
TOKENS = 8192
WINDOW = 512
LEAST = 512  # tokens below which the sizes of activations say nothing
_FIXED = datetime(2025, 1, 1)  # what a template that asks for the date is told, so that a rebuild is the same
_BREAK = "\n---\n"  # between the parts of the builtin text


@dataclass(frozen=True)
class CalibrationText:
    """Windows of at most WINDOW tokens; the file's name and sha256."""

    name: str
    sha256: str
    windows: tuple[np.ndarray, ...]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.windows))


def calibration_text(given: str, tokenizer: Tokenizer, most: int = TOKENS, longest: int = WINDOW) -> CalibrationText:
    """Windows from all over the text of a file, `most` tokens or fewer, none longer than `longest`.

    PlancError for a file that is not there, that does not parse (with the line) or that is too short.
    """
    path = FILE if given == BUILTIN else Path(given)
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8")
    except OSError as e:
        raise PlancError(f"--calib {given}: {e.strerror}. Give a text or jsonl file, or builtin.") from e
    except UnicodeDecodeError as e:
        raise PlancError(f"--calib {given}: byte {e.start} is not UTF-8. Save the file as UTF-8 text.") from e
    documents = text.split(_BREAK) if given == BUILTIN else _documents(given, text, tokenizer)
    ids: list[int] = []
    for document in documents:
        ids += tokenizer.encode(document) if isinstance(document, str) else document
    if len(ids) < LEAST:
        raise PlancError(
            f"--calib {given}: {len(ids)} tokens are too few to calibrate with; give at least {LEAST}, better "
            f"{TOKENS}, of the kind that the model will see, or --calib builtin."
        )
    return CalibrationText(given, hashlib.sha256(raw).hexdigest(), _windows(ids, most, min(WINDOW, longest)))


def _windows(ids: list[int], most: int, width: int) -> tuple[np.ndarray, ...]:
    """Whole windows at equal distances."""
    whole = [np.array(ids[i : i + width], np.int32) for i in range(0, len(ids) - width + 1, width)]
    count = min(len(whole), max(1, most // width))
    return tuple(whole[i * len(whole) // count] for i in range(count))


def _documents(given: str, text: str, tokenizer: Tokenizer) -> list[str | list[int]]:
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines or not (given.endswith(".jsonl") or lines[0][1].lstrip().startswith("{")):
        return [text]
    return [_document(f"--calib {given}, line {number}", line, tokenizer) for number, line in lines]


def _document(where: str, line: str, tokenizer: Tokenizer) -> str | list[int]:
    try:
        row: Any = json.loads(line)
    except ValueError as e:
        raise PlancError(f"{where}: {e}. A jsonl file has one JSON object a line.") from e
    if isinstance(row, dict) and isinstance(row.get("text"), str):
        return str(row["text"])
    if isinstance(row, dict) and isinstance(row.get("prompt"), str):
        return str(row["prompt"]) + str(row.get("completion", ""))
    if isinstance(row, dict) and isinstance(row.get("messages"), list):
        try:
            rendered = tokenizer.render_chat(row["messages"], add_generation_prompt=False, strftime_now=_FIXED.strftime)
        except RequestError as e:
            raise PlancError(f"{where}: {e}. Give {{'text': ..}} for a model without a chat template.") from e
        return tokenizer.encode(rendered, add_special_tokens=False)
    raise PlancError(f"{where}: expected an object with text, with prompt and completion, or with messages.")
