"""Quantized checkpoints through the compile: what is stored in a plan are the very codes that the checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from planc.codegen.target import parse
from planc.compiler import weights
from planc.compiler.ir.graph import Graph, Weight
from planc.compiler.ir.packing import unpack
from planc.compiler.ir.types import DTYPES, PACKED
from planc.compiler.lift import lift
from planc.compiler.source import ModelSource, open_source
from planc.compiler.source.base import part_of
from planc.compiler.source.bind import Binding, bind
from planc.compiler.storage import storage
from planc.compiler.trace import trace
from planc.passes.options import Options
from planc.passes.pipeline import run as run_passes
from planc.plans.tensors import read_header
from tests.compiler.source.gguf_files import write as write_gguf
from tests.compiler.source.quantized import test_compressed, test_fp8, test_mxfp4
from tests.compiler.source.quantized.checkpoints import awq, gptq, random_weight, write
from tests.models import tiny

Write = Callable[[Path], Path]


def _drawn(**more: Any) -> Any:
    return partial(random_weight, bits=4, group=32, rng=np.random.default_rng(0), **more)


def _awq(path: Path) -> Path:
    folder = tiny("qwen2", path, tokenizer=False)
    write(folder, dict(quant_method="awq", bits=4, group_size=32, version="gemm"), _drawn(), awq)
    return folder


def _gptq(path: Path) -> Path:
    folder = tiny("llama", path, tokenizer=False)
    write(folder, dict(quant_method="gptq", bits=4, group_size=32, sym=True), _drawn(zero=8), partial(gptq, bits=4))
    return folder


def _fp8(path: Path) -> Path:
    folder = tiny("llama", path, tokenizer=False, hidden_size=192, intermediate_size=320)
    test_fp8.written(folder, (128, 128))
    return folder


def _compressed(path: Path) -> Path:
    """Attention in fp8, the rest in int8."""
    make = test_compressed.weights
    token = test_compressed.TOKEN
    attention = dict(
        targets=["re:.*attn.*"], weights=make("float", 8, "channel"), input_activations=token | dict(type="float")
    )
    rest = dict(targets=["re:.*mlp.*"], weights=make("int", 8, "channel"), input_activations=token | dict(type="int"))
    return test_compressed.written(tiny("llama", path, tokenizer=False), dict(attention=attention, rest=rest))


def _experts(path: Path) -> Path:
    """A tensor for each expert."""
    folder = tiny("qwen3_moe", path, tokenizer=False, hidden_size=64, moe_intermediate_size=32, mlp_only_layers=[])
    endings = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
    write(folder, dict(quant_method="awq", bits=4, group_size=32, version="gemm"), _drawn(), awq, endings)
    return folder


def _gguf(path: Path, kind: str) -> Path:
    write_gguf(tiny("llama", path, tokenizer=False), path / "model.gguf", gguf.GGMLQuantizationType[kind])
    return path / "model.gguf"


LAYOUTS: dict[str, Write] = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "experts": _experts,
    "mxfp4": test_mxfp4.written,
    **{f"gguf {kind}": partial(_gguf, kind=kind) for kind in ("Q4_0", "Q4_1", "Q8_0")},
}


def compiled(source: ModelSource) -> Graph:
    """The graph after the passes, as `planc build --dtype auto` makes it."""
    bound: list[Binding] = []
    traced = trace(source.config(), limit=64, prepare=lambda model: bound.append(bind(model, source)))
    quant = storage("auto", None, source)
    options = Options(parse("cpu:portable"), quant.default, "f32", 64, 4, 32, 16, quant=quant)
    return run_passes(lift(traced, bound[0].recipes), options)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plan_holds_the_checkpoints_codes(layout: str, tmp_path: Path) -> None:
    with open_source(str(LAYOUTS[layout](tmp_path))) as source:
        graph = compiled(source)
        weights.write_weights(graph, source.read, tmp_path, lambda done: None, source.read_rows)
        held: dict[str, set[str]] = {name: set() for name in source.native}
        for weight in weights.split(graph)[1]:
            names = [part_of(load) for load in weight.recipe.loads]
            assert not [name for name, part in names if name in held and not part], f"{weight.name} is made of floats"
            for name, part in names:
                if part:
                    held[name].add(part)
            if names[0][1]:
                check(stored(tmp_path, weight), [source.read(load) for load in weight.recipe.loads], names[0][1])
        assert held
        for name, parts in held.items():
            assert parts == {part for part in "qsz" if f"{name}:{part}" in source.tensors}


def stored(root: Path, weight: Weight) -> np.ndarray[Any, Any]:
    """A weight of the plan's file, unpacked."""
    t = weight.value.type
    (file,) = weights.rank_files(1)
    entry = read_header(root / file)[weight.name]
    data = np.fromfile(root / file, np.uint8, entry.nbytes, offset=entry.offset).view(DTYPES[t.dtype])
    shape = [int(d) for d in t.shape]
    return unpack(data, shape, t.layout) if t.layout in PACKED else data.reshape(shape)


def check(found: np.ndarray[Any, Any], parts: list[np.ndarray[Any, Any]], part: str) -> None:
    """`found` is one part, or several one below another; of stacks, a part for each expert of the
    first, then of the next.
    """
    rows = -2 if part == "q" else -1
    if found.ndim > parts[0].ndim:
        parts = [np.stack(parts[i : i + len(found)]) for i in range(0, len(parts), len(found))]
    np.testing.assert_array_equal(found, np.concatenate(parts, axis=rows))
