"""A model's tokenizer, chat template and generation defaults become files that need no transformers to read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planc.compiler.source.base import ModelSource, one_line
from planc.compiler.source.gguf import GGUFSource
from planc.errors import PlancError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# llama.cpp's pre-tokenizers, src/llama-vocab.cpp. These isolate digits, then split like GPT-2; transformers lacks them.
_DIGITS_THEN_GPT2 = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
_GPT2 = {"gpt-2", "gpt2", "default", "phi-2", "mpt", "olmo", "jais", "jina-es", "jina-de", "mellum", "trillion"}
_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
# transformers' "no limit" is 1e30.
_MAX_LENGTH = 1 << 40


def save_tokenizer(source: ModelSource, out_dir: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json, generation_config.json and, if the model has one,
    chat_template.jinja.

    tokenizer_config.json holds the special tokens' texts, add_bos_token and add_eos_token as encoding was seen to
    behave, and model_max_length if there is one. The same model gives the same bytes. PlancError when there is no
    tokenizer or it is not of the `tokenizers` kind.
    """
    tokenizer = load_tokenizer(source)
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "tokenizer.json").write_text(tokenizer.backend_tokenizer.to_str(), encoding="utf-8")
    _write_json(out_dir / "tokenizer_config.json", _settings(tokenizer))
    _write_json(out_dir / "generation_config.json", _generation(source, tokenizer))
    if (template := _template(tokenizer)) is not None:
        (out_dir / "chat_template.jinja").write_text(template, encoding="utf-8")


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerFast:
    """The transformers tokenizer of a source, without truncation and padding."""
    tokenizer = _from_gguf(source) if isinstance(source, GGUFSource) else _from_folder(source)
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def _from_folder(source: ModelSource) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source.path, local_files_only=True, trust_remote_code=source.trust_remote_code
        )
    except Exception as e:  # noqa: BLE001 - tokenizers raises bare Exception for a damaged tokenizer.json
        raise PlancError(
            f"{source.path} has no tokenizer that can be loaded: {one_line(e)} Fetch tokenizer.json."
        ) from None
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise PlancError(
            f"{source.path}: {type(tokenizer).__name__} has no tokenizer.json form. Convert it to a fast tokenizer."
        )
    return tokenizer


def _from_gguf(source: GGUFSource) -> PreTrainedTokenizerFast:
    """By the functions under AutoTokenizer(gguf_file=), which itself would first parse the whole vocabulary slowly for
    a config.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    try:
        architecture, vocabulary, settings = get_gguf_tokenizer(str(source.path))
        backend, _ = convert_gguf_tokenizer(architecture, vocabulary)
    except Exception as e:  # noqa: BLE001 - tokenizers raises bare Exception for merges that do not fit the vocabulary
        raise PlancError(
            f"{source.path} has no tokenizer that transformers can build: {one_line(e)} Fetch the file again, or use "
            "the model's Hugging Face folder."
        ) from None
    _repair_split(source, backend, vocabulary)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)


def _repair_split(source: GGUFSource, backend: Any, vocabulary: dict[str, Any]) -> None:
    """Byte-level tokenizers split text before merging; a wrong split gives wrong tokens in silence, so unknown ones are
    refused.
    """
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    kind = vocabulary.get("pre_tokenizer_type", "default")
    if vocabulary.get("tokenizer_type") != "gpt2" or kind in _GPT2 or kind in GGUF_PRE_TOKENIZER_SPLITS:
        return
    if kind not in _DIGITS_THEN_GPT2:
        raise PlancError(f"{source.path}: pre-tokenizer {kind} is unknown. Use the model's Hugging Face folder.")
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def _settings(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    ids = tokenizer.backend_tokenizer.encode("a", add_special_tokens=True).ids
    settings: dict[str, Any] = {key: str(text) for key in _TOKENS if (text := getattr(tokenizer, key)) is not None}
    settings["add_bos_token"] = tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]
    settings["add_eos_token"] = tokenizer.eos_token_id is not None and ids[-1:] == [tokenizer.eos_token_id]
    if tokenizer.model_max_length < _MAX_LENGTH:
        settings["model_max_length"] = int(tokenizer.model_max_length)
    return settings


def _generation(source: ModelSource, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    generation = source.generation_config()
    if not generation["eos_token_id"] and tokenizer.eos_token_id is not None:
        generation["eos_token_id"] = [tokenizer.eos_token_id]
    return generation


def _template(tokenizer: PreTrainedTokenizerFast) -> str | None:
    """The default chat template; models may have others by name, which no server of ours offers."""
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
