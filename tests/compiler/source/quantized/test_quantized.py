"""The table of methods: what has no row is refused by name with what to do, wherever the config states it."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planc.compiler.reference import reference_logits
from planc.compiler.source import open_source
from planc.compiler.source.quantized import METHODS, REFUSED
from planc.errors import PlancError
from tests.compiler.source.quantized.checkpoints import awq, gptq, random_weight, replace, restate, write
from tests.compiler.source.test_wild import parent
from tests.models import tiny

AWQ: dict[str, Any] = dict(quant_method="awq", bits=4, group_size=32, version="gemm")


def refusal(folder: Path) -> str:
    with pytest.raises(PlancError) as caught:
        open_source(str(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("method", [*REFUSED, "novel"])
def test_methods_without_a_row_are_refused_by_name(method: str, tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path, tokenizer=False)
    restate(folder, dict(quant_method=method))
    message = refusal(folder)
    assert f"is quantized ({method}), which planc does not read" in message
    assert "nquantized model" in message or "Use the model that it was made from" in message or "Export" in message


def test_every_method_of_transformers_is_known() -> None:
    from transformers.utils.quantization_config import QuantizationMethod

    assert {method.value for method in QuantizationMethod} - {"gguf"} <= {*METHODS, *REFUSED}


def test_bitsandbytes_without_a_method_is_known(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path, tokenizer=False)
    restate(folder, dict(load_in_4bit=True))
    assert "is quantized (bitsandbytes)" in refusal(folder)


@pytest.mark.parametrize("method", METHODS)
def test_a_config_that_speaks_of_what_is_not_there(method: str, tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path, tokenizer=False)
    group = dict(targets=["Linear"], weights=dict(type="int", num_bits=4, strategy="group", group_size=32))
    stated = {
        "gptq": dict(bits=4, group_size=32),
        "compressed-tensors": dict(format="pack-quantized", config_groups=dict(group_0=group)),
    }.get(method, {})
    restate(folder, dict(quant_method=method) | stated)
    assert "and no tensor is" in refusal(folder)


def test_a_config_that_is_no_object(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path, tokenizer=False)
    restate(folder, "awq")  # type: ignore[arg-type]
    assert "quantization_config of config.json is no object" in refusal(folder)


def test_packed_weights_without_a_config(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path, tokenizer=False)
    write(folder, AWQ, partial(random_weight, bits=4, group=32, rng=np.random.default_rng(0)), awq)
    restate(folder, {})
    assert "mlp.down_proj.qweight is a quantized weight, and config.json does not say how" in refusal(folder)


def test_an_older_name_of_the_field(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path, tokenizer=False)
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stated | dict(compression_config=dict(quant_method="novel"))))
    assert "is quantized (novel)" in refusal(folder)


LAYOUTS: dict[str, tuple[dict[str, Any], Any]] = {
    "awq": (AWQ, awq),
    "gptq": (dict(quant_method="gptq", bits=4, group_size=32), partial(gptq, bits=4)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reading_takes_the_floats_and_little_beside(layout: str, tmp_path: Path) -> None:
    """The packed words are an eighth of the floats, the codes a quarter; floats are made some rows at a time."""
    config, pack = LAYOUTS[layout]
    name, small = "model.layers.0.mlp.up_proj.weight", dict(num_hidden_layers=1, tokenizer=False)
    folder = tiny("llama", tmp_path, hidden_size=1024, intermediate_size=2048, **small)
    write(folder, config, partial(random_weight, bits=4, group=32, rng=np.random.default_rng(0)), pack, (name,))
    with open_source(str(folder)) as source:
        size = source.tensors[name].nbytes
        ways: dict[float, Callable[[], object]] = {
            1.5: lambda: source.read(name),
            0.5: lambda: sum(piece.size for piece in source.read_pieces(name)),
            0.45: lambda: source.read(f"{name}:q"),
        }
        for most, way in ways.items():
            tracemalloc.start()
            way()
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < most * size + (3 << 20), most


@pytest.mark.parametrize("inside", [False, True])
def test_the_language_model_of_a_quantized_parent(inside: bool, tmp_path: Path) -> None:
    """Tensors below the parent's prefix, the config in the parent's or in the text model's own."""
    folder = parent("mistral3", tmp_path)
    rng = np.random.default_rng(0)
    draw = partial(random_weight, bits=4, group=32, rng=rng)
    names = [name for name in open_source(str(folder)).tensors if "language_model" in name and "_proj.weight" in name]
    assert names
    packed = write(folder, AWQ, draw, awq, tuple(names))
    stated = json.loads((folder / "config.json").read_text())
    if inside:
        stated["text_config"]["quantization_config"] = stated.pop("quantization_config")
        (folder / "config.json").write_text(json.dumps(stated))
    with open_source(str(folder)) as source:
        config = source.config()
        assert source.parent_type == "mistral3"
        assert not hasattr(config, "quantization_config")
        assert set(source.native) == set(packed)
        mine = np.concatenate([rows for _, _, rows in reference_logits(source, [[3, 14, 15, 9]])])
    plain = {name: weight.floats for name, weight in packed.items()}
    replace(folder, lambda tensors: {n: t for n, t in tensors.items() if _kept(n)} | plain)
    (folder / "config.json").write_text(json.dumps(_without(stated)))
    with open_source(str(folder)) as source:
        theirs = np.concatenate([rows for _, _, rows in reference_logits(source, [[3, 14, 15, 9]])])
    np.testing.assert_array_equal(mine, theirs)


def _kept(name: str) -> bool:
    return not name.endswith((".qweight", ".qzeros", ".scales"))


def _without(stated: dict[str, Any]) -> dict[str, Any]:
    text = {key: value for key, value in stated["text_config"].items() if key != "quantization_config"}
    return {key: value for key, value in stated.items() if key != "quantization_config"} | {"text_config": text}
