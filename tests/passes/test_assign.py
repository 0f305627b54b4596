"""Storage: heads, routers and embeddings are told apart by what they feed, and the float graph stays what it was."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from planc.compiler.ir.graph import Graph
from planc.compiler.ir.quant import SCHEMES
from planc.passes import pipeline
from planc.passes.options import Options
from planc.passes.schemes import QuantConfig
from tests.lifted import Lifted, hugging_face, lifted, logits, relative_error
from tests.models import tiny
from tests.passes.test_pipeline import ROWS, options

IDS = np.random.default_rng(0).integers(3, 300, 41)
MADE = [name for name, row in SCHEMES.items() if not row.read_only and "-g" not in name]
ERROR = {"i8": 0.05, "f8e4m3": 0.15, "u4": 0.5}  # largest, of the logits of a random model, by the codes


def without_kernels(graph: Graph, chosen: Options) -> Graph:
    """All passes up to the choice of kernels."""
    rows = tuple(p for p in pipeline.PIPELINE if p.name not in ("fuse_quantize", "select", "memory"))
    return pipeline.run(graph, chosen, pipeline=rows)[0]


def stores(graph: Graph) -> Counter[tuple[str, str]]:
    """How often an op stands with a scheme, or with the dtype of its weight."""
    found = []
    for n in graph.nodes:
        at = {"embedding": 0, "linear": 1, "expert_linear": 2}.get(n.op)
        if at is not None:
            found.append((n.op, graph.types[n.inputs[at]].dtype))
        if "scheme" in dict(n.attrs):
            found.append((n.op, str(n.attr("scheme"))))
    return Counter(found)


@pytest.fixture(scope="module", params=["llama", "mixtral", "gpt2"])
def model(request, tmp_path_factory) -> Lifted:
    sizes = {"gpt2": {}, "llama": {"tie_word_embeddings": False}, "mixtral": {"intermediate_size": 128}}[request.param]
    return lifted(tiny(request.param, tmp_path_factory.mktemp(request.param), **sizes))


@pytest.mark.parametrize("name", MADE)
def test_a_scheme_rounds_and_breaks_nothing(name: str, model: Lifted) -> None:
    graph = without_kernels(model.graph, options(dtype=name))
    want = hugging_face(model.path, IDS)[ROWS]
    assert 1e-5 < relative_error(logits(model, graph, IDS, ROWS), want) < ERROR[SCHEMES[name].codes]


def test_a_head_that_is_the_embedding_too_does_not_turn(model: Lifted) -> None:
    """One reads rows of the table as they are, so the other multiplies rows as they are."""
    quant = QuantConfig("bf16", kinds={"head": "int8", "embedding": "int8"})
    graph = without_kernels(model.graph, options(dtype="bf16", quant=quant))
    want = hugging_face(model.path, IDS)[ROWS]
    assert relative_error(logits(model, graph, IDS, ROWS), want) < ERROR["i8"]
    turned = {dict(n.attrs).get("hadamard") for n in graph.nodes if n.op == "quantize_rows"}
    assert (turned == {None}) == any(n.op == "qembedding" for n in graph.nodes if n.inputs[0] in head_parts(graph))


def head_parts(graph: Graph) -> set[str]:
    """What the product that makes the logits reads."""
    return {i for n in graph.nodes if n.op == "qlinear" and n.out.name in graph.outputs for i in n.inputs}


def test_each_kind_gets_its_storage(model: Lifted) -> None:
    found = stores(without_kernels(model.graph, options(dtype="int8")))
    arch = model.path.name.split("-")[0]
    wanted = {
        "llama": {("qlinear", "int8"): 8, ("qlinear", "int8-wo"): 1, ("embedding", "bf16"): 1},
        "mixtral": {
            ("qlinear", "int8"): 4, ("qexpert_linear", "int8"): 4, ("linear", "bf16"): 2, ("qlinear", "int8-wo"): 1,
            ("embedding", "bf16"): 1,
        },
        "gpt2": {
            ("qlinear", "int8"): 8, ("qlinear", "int8-wo"): 1, ("qembedding", "int8-wo"): 1, ("embedding", "bf16"): 1,
        },
    }[arch]  # fmt: skip
    assert found == wanted


def test_rows_are_rounded_once_for_all_that_read_them(model: Lifted) -> None:
    graph = without_kernels(model.graph, options(dtype="int8"))
    rounded = [n.inputs[0] for n in graph.nodes if n.op == "quantize_rows"]
    assert len(set(rounded)) == len(rounded) > 0


def test_layers_of_unlike_storage_are_not_merged(tmp_path) -> None:
    model = lifted(tiny("llama", tmp_path))
    config = QuantConfig("awq-g32", modules=((r"layers\.0\.self_attn\.k_proj", "bf16"),))
    chosen = replace(options(dtype="awq-g32"), quant=config)
    graph = without_kernels(model.graph, chosen)
    found = stores(graph)
    assert found["linear", "bf16"] == 1
    assert found["qlinear", "awq-g32"] == 8  # q+v, o, gate+up, down; q+k+v, o, gate+up, down
    want = hugging_face(model.path, IDS)[ROWS]
    assert relative_error(logits(model, graph, IDS, ROWS), want) < ERROR["u4"]
