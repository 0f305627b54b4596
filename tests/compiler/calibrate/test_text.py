"""What calibration reads: text or jsonl in each of its forms, windows from all over it, and files that do not serve."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from planc.compiler.accuracy import EVAL_TEXT
from planc.compiler.calibrate.text import FILE, WINDOW, calibration_text
from planc.compiler.coverage.tokenizer import small_tokenizer
from planc.errors import PlancError
from planc.runtime.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    small_tokenizer().save_pretrained(folder)
    return Tokenizer.load(folder)


def test_the_builtin_text_spans_the_kinds_and_is_not_what_the_gate_reads(tokenizer: Tokenizer) -> None:
    text = FILE.read_text(encoding="utf-8")
    assert len(text.encode()) > 40_000
    for part in (
        "def ",
        "#include",
        "SELECT",
        "user:",
        '{"id"',
        "| metric |",
        "l'",
        "ß",
        "¿",
        "の",
        "的",
        "ы",
        "ال",
        "है",
    ):
        assert part in text
    judged = EVAL_TEXT.read_text(encoding="utf-8")
    seen = {judged[i : i + 40] for i in range(len(judged) - 40)}
    assert not [text[i : i + 40] for i in range(len(text) - 40) if text[i : i + 40] in seen]
    made = calibration_text("builtin", tokenizer, 4096)
    assert (made.tokens, made.name) == (4096, "builtin")
    assert made.sha256 == hashlib.sha256(FILE.read_bytes()).hexdigest()


def test_windows_come_from_all_over_the_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {i} of many\n" for i in range(2000)))
    ids = tokenizer.encode(path.read_text())
    made = calibration_text(str(path), tokenizer, 4 * WINDOW)
    assert [len(w) for w in made.windows] == [WINDOW] * 4
    assert list(made.windows[0]) == ids[:WINDOW]
    starts = [next(i for i in range(0, len(ids), WINDOW) if ids[i : i + WINDOW] == list(w)) for w in made.windows]
    assert np.diff(starts).min() > len(ids) // 5
    short = calibration_text(str(path), tokenizer, 2 * WINDOW, longest=100)
    assert [len(w) for w in short.windows] == [100] * (2 * WINDOW // 100)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"text": "plain words"}, "plain words"),
        ({"prompt": "a question", "completion": " its answer"}, "a question its answer"),
    ],
)
def test_lines_of_json(row: dict, text: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([json.dumps(row)] * 300))
    made = calibration_text(str(path), tokenizer)
    once = tokenizer.encode(text)
    assert list(made.windows[0]) == (once * WINDOW)[:WINDOW]


def test_messages_go_through_the_chat_template(tokenizer: Tokenizer, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([json.dumps({"messages": messages})] * 300))
    rendered = tokenizer.render_chat(messages, add_generation_prompt=False)
    once = tokenizer.encode(rendered, add_special_tokens=False)
    assert list(calibration_text(str(path), tokenizer).windows[0]) == (once * WINDOW)[:WINDOW]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n", r"\d+ tokens are too few"),
        (b'{"text": "a"}', r"\d+ tokens are too few to calibrate with; give at least 512"),
        (b"a few words", "line 1: .*one JSON object a line"),
        (b"\xff\xfe", "byte 0 is not UTF-8"),
        (b'{"text": "a"}\n{"text": ', "line 2: .*one JSON object a line"),
        (b'{"txt": "a"}', "line 1: expected an object with text"),
    ],
)
def test_files_that_do_not_serve(content: bytes, message: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(PlancError, match=message):
        calibration_text(str(path), tokenizer)


def test_messages_for_a_model_without_a_chat_template(tmp_path: Path) -> None:
    small_tokenizer(chat_template=False).save_pretrained(tmp_path)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}))
    with pytest.raises(PlancError, match=r"line 1: .*no chat template.*Give .* a model without"):
        calibration_text(str(tmp_path / "a.jsonl"), Tokenizer.load(tmp_path))


def test_a_file_that_is_not_there(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(PlancError, match=r"none\.txt: No such file.*builtin"):
        calibration_text(str(tmp_path / "none.txt"), tokenizer)
