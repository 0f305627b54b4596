"""The test models themselves: seeded, non-trivial in every parameter, with a tokenizer that round trips."""

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from planc.compiler.coverage.tokenizer import small_tokenizer
from tests.models import ARCHS, VOCAB, tiny


@pytest.mark.parametrize("arch", ARCHS)
def test_no_parameter_is_trivial(arch: str, tmp_path: Path) -> None:
    for name, array in load_file(tiny(arch, tmp_path, tokenizer=False) / "model.safetensors").items():
        assert array.std() > 0.05, name


def test_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = (tiny("qwen2", tmp_path / part) for part in "ab")
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)
    other = tiny("qwen2", tmp_path, seed=1)
    assert (other / "model.safetensors").read_bytes() != (first / "model.safetensors").read_bytes()


def test_tokenizer_round_trips() -> None:
    tokenizer = small_tokenizer()
    text = "the thing on a tree: Zürich 12345\n\t🎉"
    ids = tokenizer(text).input_ids
    assert ids[0] == 1
    assert max(ids) < VOCAB
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
