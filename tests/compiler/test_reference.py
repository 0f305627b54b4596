"""The judge: streamed modules give transformers' own logits, with one module's parameters in memory at a time."""

from pathlib import Path

import numpy as np
import pytest
import torch

from planc.compiler import reference
from planc.compiler.ir.recipe import infer
from planc.compiler.reference import StreamedModel, reference_logits
from planc.compiler.source import ModelSource, bind, new_model, open_source
from planc.compiler.source.buffers import real_buffers
from planc.errors import PlancError
from tests.models import ARCHS, tiny
from tests.moe import MOE

OTHERS = {
    "opt": dict(word_embed_proj_dim=64, ffn_dim=96, do_layer_norm_before=True),
    "roberta": dict(is_decoder=True, pad_token_id=0, type_vocab_size=2),
}
SEQUENCES = [[5, 9, 200, 4, 7, 8, 3, 99, 100, 1, 2, 33, 44], [17, 3, 3, 4], [250, 251, 9, 8, 7, 6, 5, 4, 3]]


def streamed(source: ModelSource, dtype: torch.dtype = torch.float32, rows: int = 4) -> list[np.ndarray]:  # type: ignore[type-arg]
    """The logits of each sequence, joined; checks that the chunks tile it."""
    parts: list[list[np.ndarray]] = [[] for _ in SEQUENCES]  # type: ignore[type-arg]
    for index, start, logits in reference_logits(source, SEQUENCES, rows_per_chunk=rows, dtype=dtype, num_threads=1):
        assert start == sum(map(len, parts[index]))
        assert len(logits) <= rows
        parts[index].append(logits)
    return [np.concatenate(part) for part in parts]


def plain(folder: Path, dtype: torch.dtype) -> list[np.ndarray]:  # type: ignore[type-arg]
    """Each sequence alone through from_pretrained."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        return [model(input_ids=torch.tensor([ids])).logits[0].float().numpy() for ids in SEQUENCES]


@pytest.mark.parametrize("arch", ARCHS)
def test_equals_from_pretrained(arch: str, tmp_path: Path) -> None:
    folder = tiny(arch, tmp_path, tokenizer=False)
    with open_source(str(folder)) as source:
        for found, expected in zip(streamed(source), plain(folder, torch.float32), strict=True):
            assert found.dtype == np.float32
            assert found.shape == expected.shape
            assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("arch", [*MOE, "llama4_text"])
def test_experts_equal_from_pretrained(arch: str, tmp_path: Path) -> None:
    """From checkpoints with a tensor an expert or fused ones; dbrx's parent module uses the weights of its child."""
    fields = MOE.get(arch) or dict(num_local_experts=4, moe_layers=[1], intermediate_size_mlp=96, head_dim=16)
    folder = tiny(arch, tmp_path, tokenizer=False, dtype="bfloat16", **fields)
    with open_source(str(folder)) as source:
        for found, expected in zip(streamed(source), plain(folder, torch.float32), strict=True):
            assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("arch", ["mixtral", "deepseek_v3", "gpt_oss", "jetmoe"])
def test_one_expert_is_loaded_at_a_time(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = {"num_local_experts": 16, "n_routed_experts": 16}
    fields = {name: experts.get(name, value) for name, value in MOE[arch].items()}
    with open_source(str(tiny(arch, tmp_path, tokenizer=False, vocab_size=331, **fields))) as source:
        model = StreamedModel(source)
        stacks = [infer(r) for r in model._binding.recipes.values() if len(infer(r).shape) == 3]
        assert max(t.shape[0] for t in stacks) == 16
        reads: list[int] = []
        rows, whole = source.read_rows, source.read
        monkeypatch.setattr(source, "read_rows", lambda *a: reads.append(rows(*a).nbytes) or rows(*a))
        monkeypatch.setattr(source, "read", lambda name: reads.append(whole(name).nbytes) or whole(name))
        model.hidden(torch.tensor([[1, 2, 3, 4, 5, 6, 7]]))
        flat = max(infer(r).nbytes() for r in model._binding.recipes.values() if len(infer(r).shape) < 3)
        assert max(reads) <= flat < max(t.nbytes() for t in stacks)
        assert model.peak_bytes <= 2 * flat
        assert model.live_bytes == 0


@pytest.mark.parametrize("arch", ["opt", "roberta"])
def test_a_head_and_positions_of_their_own(arch: str, tmp_path: Path) -> None:
    """opt's head asks the decoder inside its base model; roberta's positions start after its padding id."""
    with open_source(str(tiny(arch, tmp_path, tokenizer=False, **OTHERS[arch]))) as source:
        for found, expected in zip(streamed(source), plain(source.path, torch.float32), strict=True):
            assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_a_head_that_asks_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    class Output:
        logits = torch.zeros(1, 4, 330)

    with open_source(str(tiny("llama", tmp_path, tokenizer=False))) as source:
        monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "forward", lambda self, **others: Output())
        with pytest.raises(PlancError, match=r"does not ask its base model.*--reference none"):
            streamed(source)


def test_bf16_equals_from_pretrained(tmp_path: Path) -> None:
    """As close to transformers in bf16 as rounding allows, and not to float32."""
    folder = tiny("gemma3_text", tmp_path, tokenizer=False, dtype="bfloat16")
    with open_source(str(folder)) as source:
        found, exact = streamed(source, torch.bfloat16), streamed(source)
    error = [np.abs(a - b).max() for a, b in zip(found, plain(folder, torch.bfloat16), strict=True)]
    distance = [np.abs(a - b).max() for a, b in zip(found, exact, strict=True)]
    assert max(error) < 0.2 * min(distance)


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt2"])
def test_one_module_is_loaded_at_a_time(arch: str, tmp_path: Path) -> None:
    """gemma2 and gpt2: the tied matrix is loaded for the embedding, dropped, and loaded again for the head."""
    with open_source(str(tiny(arch, tmp_path, tokenizer=False, vocab_size=1000))) as source:
        model = StreamedModel(source)
        largest = max(info.nbytes for info in source.tensors.values())
        total = sum(info.nbytes for info in source.tensors.values())
        hidden = model.hidden(torch.tensor([[1, 2, 3]]))
        assert model.live_bytes == 0
        with model.head_loaded():
            for _ in range(3):
                model.logits(hidden[0])
            assert model.live_bytes == largest
        assert model.live_bytes == 0
        assert largest <= model.peak_bytes <= largest + 1024 < total
        assert all(parameter.is_meta for parameter in model._model.parameters())


def test_the_head_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_source(str(tiny("llama", tmp_path, tokenizer=False))) as source:
        reads: list[str] = []
        read = source.read
        monkeypatch.setattr(source, "read", lambda name: reads.append(name) or read(name))
        streamed(source, rows=2)
        assert sorted(reads) == sorted(source.tensors)


@pytest.mark.parametrize("arch", ARCHS)
def test_buffers_are_those_of_a_real_model(arch: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny(arch, tmp_path, tokenizer=False)
    expected = dict(AutoModelForCausalLM.from_pretrained(folder).named_buffers())
    with open_source(str(folder)) as source:
        model = new_model(source.config())
        made = real_buffers(model, source, bind(model, source))
    assert set(made) == set(expected)
    assert all(torch.equal(made[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "linear", "factor": 2.0},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_rope_scaling(tmp_path: Path, scaling: dict[str, object]) -> None:
    folder = tiny("llama", tmp_path, tokenizer=False, rope_parameters={"rope_theta": 10000.0, **scaling})
    with open_source(str(folder)) as source:
        for found, expected in zip(streamed(source), plain(folder, torch.float32), strict=True):
            assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("sequences", [[], [[]], [[1], []]])
def test_empty_input(tmp_path: Path, sequences: list[list[int]]) -> None:
    with (
        open_source(str(tiny("llama", tmp_path, tokenizer=False))) as source,
        pytest.raises(PlancError, match="at least one"),
    ):
        next(reference_logits(source, sequences))


@pytest.mark.parametrize("token", [-1, 330])
def test_token_outside_the_vocabulary(tmp_path: Path, token: int) -> None:
    with (
        open_source(str(tiny("llama", tmp_path, tokenizer=False))) as source,
        pytest.raises(PlancError, match="0 to 329"),
    ):
        next(reference_logits(source, [[1], [2, token]]))


def test_threads_are_put_back(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    with open_source(str(tiny("llama", tmp_path, tokenizer=False))) as source:
        for _ in reference_logits(source, [[1, 2]], num_threads=before + 1):
            assert torch.get_num_threads() == before
    assert torch.get_num_threads() == before


# "The capital of France is Paris. The capital of Italy is Rome. The capital of Germany is Berlin."
SMOLLM2 = [
    504,
    3575,
    282,
    4649,
    314,
    7042,
    30,
    378,
    3575,
    282,
    7158,
    314,
    7268,
    30,
    378,
    3575,
    282,
    4521,
    314,
    11452,
    30,
]
GEMMA = [
    2,
    818,
    5279,
    529,
    7001,
    563,
    9079,
    236761,
    669,
    5279,
    529,
    11702,
    563,
    13706,
    236761,
    669,
    5279,
    529,
    9405,
    563,
]
GEMMA += [15687, 236761]


@pytest.mark.real
@pytest.mark.parametrize(("model", "ids", "bound"), [("smollm2-135m", SMOLLM2, 4.5), ("gemma3-270m", GEMMA, 7.0)])
def test_real_model_speaks(model: str, ids: list[int], bound: float) -> None:
    """Perplexity is 3.6 and 5.8; q and k left permuted give 11.9, norms without offset 1e8."""
    with open_source(model) as source:
        logits = np.concatenate([chunk for _, _, chunk in reference_logits(source, [ids], num_threads=1)])
    scores = torch.from_numpy(logits).log_softmax(-1).numpy()
    assert np.exp(-scores[np.arange(len(ids) - 1), ids[1:]].mean()) < bound
    assert logits[-3].argmax() == ids[-2]


def test_stored_dtypes_are_converted_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny("llama", tmp_path, tokenizer=False, dtype="bfloat16")
    with open_source(str(folder)) as source:
        expected = streamed(source)
        assert any(info.dtype == "bf16" for info in source.tensors.values())
        monkeypatch.setattr(source, "read", lambda name: pytest.fail(f"{name} was read whole"))
        for found, wanted in zip(streamed(source), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
    for found, wanted in zip(expected, plain(folder, torch.float32), strict=True):
        assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_a_module_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    with open_source(str(tiny("llama", tmp_path, tokenizer=False))) as source:
        monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: x @ x)
        with pytest.raises(PlancError, match=r"LlamaForCausalLM failed while it computed hidden states: .*--reference"):
            streamed(source)


def test_threads_are_those_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "usable_cpus", lambda: 1)
    before = torch.get_num_threads()
    with reference._threads(None):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
