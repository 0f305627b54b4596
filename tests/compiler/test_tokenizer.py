"""Saved tokenizers, read with `tokenizers` alone, encode as the model's own tokenizer does and give text back."""

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer

from planc.compiler.source import open_source
from planc.compiler.tokenizer import save_tokenizer
from planc.errors import PlancError
from tests.compiler.source.gguf_files import write
from tests.compiler.test_reference import GEMMA, SMOLLM2
from tests.models import tiny

CAPITALS = "The capital of France is Paris. The capital of Italy is Rome. The capital of Germany is Berlin."
TEXTS = [
    "",
    "Hello, world",
    "hello 123 4567.89",
    "  two  spaces   three\n\n\ttab \r\n",
    "Zürich 北京 🎉 é e\u0301 ﬁ ²³½ ٣",
    " " * 20 + "x" + "\n" * 5,
    "def f(x):\n    return x ** 2  # 1e-05\n",
    "a\x00b\x7f<not_special>",
]


def saved(model: str, out: Path) -> Tokenizer:
    with open_source(model) as source:
        save_tokenizer(source, out)
    return Tokenizer.from_file(str(out / "tokenizer.json"))


def load(path: Path) -> Any:
    return json.loads(path.read_text())


def round_trips(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_folder(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = tiny("llama", tmp_path)
    tokenizer = saved(str(folder), tmp_path / "out")
    original = AutoTokenizer.from_pretrained(folder)
    round_trips(tokenizer)
    for text in TEXTS:
        assert tokenizer.encode(text).ids == original(text).input_ids
    assert load(tmp_path / "out/tokenizer_config.json") == {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "model_max_length": 256,
    }
    assert load(tmp_path / "out/generation_config.json") == {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 0}
    template = (tmp_path / "out/chat_template.jinja").read_text()
    rendered = jinja2.Template(template).render(
        messages=[{"role": "user", "content": "hi"}], bos_token="<bos>", eos_token="<eos>", add_generation_prompt=True
    )
    assert rendered == "<bos>[user] hi<eos>[assistant] "


def test_no_chat_template(tmp_path: Path) -> None:
    saved(str(tiny("llama", tmp_path, chat_template=False)), tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_of_named_templates_only_the_default_is_kept(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("tools")
    saved(str(folder), tmp_path / "out")
    assert (tmp_path / "out/chat_template.jinja").is_file()
    assert not (tmp_path / "out/additional_chat_templates").exists()


def test_a_template_cannot_name_a_file_to_write(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path, chat_template=False)
    config = load(folder / "tokenizer_config.json")
    config["chat_template"] = [
        {"name": "../../evil", "template": "x"},
        {"name": "default", "template": "{{ messages }}"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    saved(str(folder), tmp_path / "deep/out")
    assert (tmp_path / "deep/out/chat_template.jinja").read_text() == "{{ messages }}"
    assert not list(tmp_path.rglob("evil*"))


def test_truncation_and_padding_are_dropped(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path)
    data = load(folder / "tokenizer.json")
    data["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    assert len(saved(str(folder), tmp_path / "out").encode("x" * 50).ids) == 51


def test_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path)
    for out in "ab":
        saved(str(folder), tmp_path / out)
    names = [path.name for path in (tmp_path / "a").iterdir()]
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)


def test_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(PlancError, match="no tokenizer") as caught:
        saved(str(tiny("llama", tmp_path, tokenizer=False)), tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_damaged_tokenizer(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(PlancError, match="no tokenizer"):
        saved(str(folder), tmp_path / "out")


def test_gguf_digits_are_isolated(tmp_path: Path) -> None:
    """The pre-tokenizer that transformers lacks: without it, `12` of the merges would be one token."""
    write(tiny("llama", tmp_path), tmp_path / "model.gguf", pre="smollm")
    tokenizer = saved(str(tmp_path / "model.gguf"), tmp_path / "out")
    round_trips(tokenizer)
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("ab 12 x3²")] == [
        "ab",
        "Ġ",
        "1",
        "2",
        "Ġx",
        "3",
        "Â²",
    ]
    assert tokenizer.encode("x").ids[0] == 1
    assert load(tmp_path / "out/tokenizer_config.json")["add_bos_token"] is True


def test_gguf_with_a_flipped_bit_in_its_merges(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(tiny("llama", tmp_path), path)
    sound = path.read_bytes()
    at = sound.index(b"tokenizer.ggml.merges") + sound[sound.index(b"tokenizer.ggml.merges") :].index(b"h e")
    path.write_bytes(sound[:at] + b"x" + sound[at + 1 :])
    with pytest.raises(PlancError, match=r"model.gguf has no tokenizer .*out of vocabulary. Fetch") as caught:
        saved(str(path), tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_gguf_unknown_pre_tokenizer(tmp_path: Path) -> None:
    write(tiny("llama", tmp_path), tmp_path / "model.gguf", pre="never-heard-of")
    with pytest.raises(PlancError, match="never-heard-of"):
        saved(str(tmp_path / "model.gguf"), tmp_path / "out")


@pytest.mark.real
def test_smollm2(tmp_path: Path) -> None:
    tokenizer = saved("smollm2-135m", tmp_path)
    round_trips(tokenizer)
    assert tokenizer.encode("hello 123").tokens == ["hello", "Ġ", "1", "2", "3"]
    assert tokenizer.encode("It costs $4,567.89 in 2024").ids == [
        *tokenizer.encode("It costs $").ids,
        *(tokenizer.token_to_id(c) for c in "4,567.89"),
        *tokenizer.encode(" in").ids,
        tokenizer.token_to_id("Ġ"),
        *(tokenizer.token_to_id(c) for c in "2024"),
    ]
    assert tokenizer.encode(CAPITALS).ids == SMOLLM2
    chat = tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n")
    assert (chat.ids[0], chat.ids[-2]) == (1, 2)
    assert "<|im_start|>assistant" in (tmp_path / "chat_template.jinja").read_text()
    assert load(tmp_path / "generation_config.json")["eos_token_id"] == [2]
    assert load(tmp_path / "tokenizer_config.json")["add_bos_token"] is False


@pytest.mark.real
def test_gemma(tmp_path: Path) -> None:
    tokenizer = saved("gemma3-270m", tmp_path)
    round_trips(tokenizer)
    assert tokenizer.encode("hello 123").tokens == ["<bos>", "hello", "▁", "1", "2", "3"]
    assert tokenizer.encode(CAPITALS).ids == GEMMA
    assert tokenizer.encode("a   b").tokens == ["<bos>", "a", "▁▁▁", "b"]
    assert tokenizer.encode("<start_of_turn>user\nhi", add_special_tokens=False).tokens[0] == "<start_of_turn>"
    assert load(tmp_path / "generation_config.json") == {"bos_token_id": 2, "eos_token_id": [1], "pad_token_id": 0}
    assert load(tmp_path / "tokenizer_config.json")["add_bos_token"] is True
    assert not (tmp_path / "chat_template.jinja").exists()
