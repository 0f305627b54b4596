"""Configs that make one graph have no difference; of others, the first key and both values are told."""

from pathlib import Path

import pytest

from planc.compiler.source import new_model, record
from planc.errors import PlancError
from tests.models import config_of


def test_what_cannot_change_a_step_makes_no_difference() -> None:
    plain = record.recorded(config_of("llama"))
    other = config_of("llama", eos_token_id=[2, 5], pad_token_id=None, attention_dropout=0.5, initializer_range=1.0)
    other.architectures, other.dtype, other._name_or_path, other.use_cache = ["Mine"], "float16", "/elsewhere", False
    told = record.recorded(other)
    assert told != plain
    assert record.first_difference(plain, told) is None
    assert not {"_name_or_path", "transformers_version"} & told.keys()


def test_a_token_id_counts_where_a_table_leaves_out_its_row() -> None:
    pads = [record.recorded(config_of("xglm", pad_token_id=pad)) for pad in (1, 5)]
    assert record.first_difference(*pads) is None
    counting = record.counting(new_model(config_of("xglm", pad_token_id=5)))
    assert record.first_difference(*pads, counting) == ("pad_token_id", 1, 5)
    assert record.counting(new_model(config_of("llama"))) == ()


def test_the_first_difference_is_told_with_both_values() -> None:
    plain = record.recorded(config_of("llama"))
    assert record.first_difference(plain, record.recorded(config_of("llama", rms_norm_eps=0.5, vocab_size=9))) == (
        "rms_norm_eps",
        1e-06,
        0.5,
    )
    assert record.first_difference(plain, plain | {"model_type": "mistral", "a": 1}) == (
        "model_type",
        "llama",
        "mistral",
    )
    rope = {**plain["rope_parameters"], "rope_theta": 7.0}
    differs = record.first_difference(plain, plain | {"rope_parameters": rope})
    assert differs == ("rope_parameters.rope_theta", 10000.0, 7.0)
    assert record.first_difference(plain, plain | {"new": 3}) == ("new", None, 3)
    assert record.first_difference(plain, plain | {"new": None}) is None


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    config = config_of("gemma2")
    record.write(config, tmp_path)
    first = (tmp_path / record.FILE).read_bytes()
    assert record.read(tmp_path) == record.recorded(config)
    record.write(config_of("gemma2"), tmp_path)
    assert (tmp_path / record.FILE).read_bytes() == first
    with pytest.raises(PlancError, match=r"has no config\.json.*Build the plan again"):
        record.read(tmp_path / "none")
