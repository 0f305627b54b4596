"""A graph over one checkpoint becomes the graph of another of the same model, as compiling that one gives it."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from planc.codegen.target import parse
from planc.compiler.ir.graph import Graph
from planc.compiler.ir.text import to_text
from planc.compiler.lift import lift
from planc.compiler.rebind import rebind
from planc.compiler.source import Binding, ModelSource, bind, new_model, open_source
from planc.compiler.storage import storage
from planc.compiler.trace import trace
from planc.errors import PlancError
from planc.passes import pipeline
from planc.passes.options import Options
from tests.compiler import test_held
from tests.models import tiny
from tests.moe import MOE

Compile = Callable[..., tuple[Graph, ModelSource, Binding]]


def without_weights(folder: Path, to: Path) -> Path:
    """The folder of a model that is described alone."""
    shutil.copytree(folder, to / folder.name)
    for file in (to / folder.name).glob("*.safetensors*"):
        file.unlink()
    return to / folder.name


@pytest.fixture(scope="module")
def compiled() -> Compile:
    """The planned graph of a folder, or of what is said of it; its source and how that binds."""

    @cache
    def lifted(path: Path) -> tuple[Graph, ModelSource]:
        source = open_source(str(path), weights=any(path.glob("*.safetensors")))
        found: list[Binding] = []
        traced = trace(source.config(), prepare=lambda model: found.append(bind(model, source)))
        return lift(traced, found[0].recipes), source

    def make(path: Path, dtype: str, tp: int = 1) -> tuple[Graph, ModelSource, Binding]:
        graph, source = lifted(path)
        quant = storage(dtype, None, source)
        options = Options(parse("cpu:x86-64-v3"), quant.default, "bf16", 256, 8, 64, 16, tp=tp, quant=quant)
        return pipeline.run(graph, options)[0], source, bind(new_model(source.config()), source)

    return make


# Experts with a tensor each in the checkpoint, stacked in the model; a tied head and norms of 1 + w; biases, fused q, k
# and v; gate and up in turns; latents. Of the first, a scheme over half of the checkpoints, and the rest nightly.
ALL = ("float32", "bfloat16", "float16"), (("f32", 1), ("bf16", 2), ("int8-wo", 1), ("fp8", 2))
CASES = [("mixtral", ("float16",), (("bf16", 1), ("fp8", 2)))]
CASES += [
    pytest.param(a, *ALL, marks=pytest.mark.slow) for a in ("mixtral", "gemma2", "gpt2", "gpt_oss", "deepseek_v3")
]


@pytest.mark.parametrize(("arch", "dtypes", "stores"), CASES)
def test_names_layouts_and_dtypes_of_checkpoints_differ(
    arch: str, dtypes: tuple[str, ...], stores: tuple[tuple[str, int], ...], compiled: Compile, tmp_path: Path
) -> None:
    folders = [tiny(arch, tmp_path / d, dtype=d, **MOE.get(arch, {})) for d in dtypes]
    said = without_weights(folders[0], tmp_path / "said")
    for dtype, tp in stores:
        graphs = {folder: compiled(folder, dtype, tp) for folder in (*folders, said)}
        assert len({to_text(graph) for graph, _, _ in graphs.values()}) > 1
        for graph, _, _ in graphs.values():
            for folder in folders:
                wanted, source, binding = graphs[folder]
                assert to_text(rebind(graph, binding, source)) == to_text(wanted)


def refused(graph: Graph, binding: Binding, source: ModelSource, *words: str) -> None:
    with pytest.raises(PlancError) as told:
        rebind(graph, binding, source)
    for word in (*words, str(source.path)):
        assert word in str(told.value)


def test_codes_are_those_of_the_checkpoint_or_refused(compiled: Compile, tmp_path: Path) -> None:
    held = test_held._awq(tmp_path / "held")
    plain = tiny("qwen2", tmp_path / "plain")
    native, source, binding = compiled(held, "auto")
    assert to_text(rebind(native, binding, source)) == to_text(native)
    q_proj = "model.layers.0.self_attn.q_proj.weight"
    _, plain_source, plain_binding = compiled(plain, "f32")
    refused(native, plain_binding, plain_source, q_proj, "does not hold it quantized", "in awq-g32")
    words = (q_proj, "holds it as awq-g32, with scales in f32", "built for bf16")
    refused(compiled(plain, "awq-g32")[0], binding, source, *words)
    refused(compiled(plain, "int8")[0], binding, source, f"holds {q_proj} as awq-g32", "stores int8", "round it twice")


def test_what_is_tied_must_be_shared(compiled: Compile, tmp_path: Path) -> None:
    tied, own = tiny("gemma2", tmp_path / "tied"), tiny("gemma2", tmp_path / "own")
    tensors = load_file(own / "model.safetensors")
    head = tensors["model.embed_tokens.weight"] + np.float32(1)
    save_file(tensors | {"lm_head.weight": head}, own / "model.safetensors", {"format": "pt"})
    graph, source, binding = compiled(own, "bf16")
    assert to_text(rebind(graph, binding, source)) == to_text(graph)
    refused(compiled(tied, "bf16")[0], binding, source, "lm_head.weight", "of its own")


@pytest.mark.slow
def test_a_tensor_of_another_layout_is_named(compiled: Compile, tmp_path: Path) -> None:
    """A tensor for each expert was loaded, and the checkpoint has the experts in one: no parameter has that name."""
    apart = tiny("mixtral", tmp_path / "apart", **MOE["mixtral"])
    graph = compiled(apart, "bf16")[0]
    said, folder = without_weights(apart, tmp_path / "said"), tmp_path / "stacked"
    with open_source(str(said), weights=False) as source:
        tensors = {name: np.zeros(info.shape, np.float32) for name, info in source.tensors.items()}
    shutil.copytree(said, folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with open_source(str(folder)) as source:
        binding = bind(new_model(source.config()), source)
        refused(graph, binding, source, "model.layers.0.block_sparse_moe.gate.weight", "has no such tensor", "[4, 96]")
        made = rebind(compiled(said, "bf16")[0], binding, source)
    assert all(name in tensors for w in made.weights for name in w.recipe.loads)
