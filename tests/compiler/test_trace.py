"""The tracer and its hooks: what a trace holds, that nothing is allocated, and every way in which it must refuse."""

import inspect
import resource
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.masking_utils import (
    AttentionMaskInterface,
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    packed_sequence_mask_function,
    remap_positions_for_packed_sequence,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import AttentionInterface
from transformers.models.bloom import modeling_bloom
from transformers.models.llama import modeling_llama

from planc.compiler import hooks
from planc.compiler.coverage.small import small as coverage
from planc.compiler.ir.recipe import load
from planc.compiler.ir.verify import verify
from planc.compiler.lift import lift
from planc.compiler.trace import Step, capture, trace
from planc.errors import PlancError
from tests.models import config_of


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def small(**fields: Any) -> Any:
    """The config of a tiny model of one layer."""
    return config_of("llama", num_hidden_layers=1, **fields)


# ---- what a trace holds


def test_nothing_is_allocated_and_only_live_nodes_remain() -> None:
    traced = trace(small())
    assert all(p.is_meta for p in traced.module.parameters())
    names = {str(n.target) for n in traced.graph.nodes}
    assert not {"aten.cumsum.default", "aten._assert_tensor_metadata.default"} & names
    assert sorted(traced.inputs.values()) == ["ids", "logit_rows", "positions"]
    assert sorted(traced.symbols.values()) == ["R", "T"]


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "gptj"])
def test_buffers_are_those_of_a_model_built_on_the_cpu(arch: str) -> None:
    fields: dict[str, Any] = dict(n_embd=64, n_layer=2, n_head=4, rotary_dim=8) if arch == "gptj" else {}
    config = config_of(arch, **fields)
    buffers = {b.name: b.value for b in trace(config).buffers.values()}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert buffers
    for name, value in model.named_buffers():
        assert torch.equal(buffers[name], value), name


def test_a_buffer_that_its_module_does_not_make_again_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = modeling_llama.LlamaRMSNorm.__init__

    def init(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.register_buffer("odd", torch.ones(3), persistent=False)

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "__init__", init)
    with pytest.raises(PlancError, match=r"buffer model.layers.0.input_layernorm.odd of LlamaForCausalLM: neither"):
        trace(small())


def test_a_buffer_that_is_not_initialised_comes_from_building_its_module_again(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {b.name: b.value for b in trace(small()).buffers.values()}
    monkeypatch.setattr(modeling_llama.LlamaPreTrainedModel, "_init_weights", lambda self, module: None)
    for buffer in trace(small()).buffers.values():
        assert torch.equal(buffer.value, expected[buffer.name])


def test_tied_parameters_have_all_their_names() -> None:
    traced = trace(config_of("gpt2"))
    assert ("transformer.wte.weight", "lm_head.weight") in traced.parameters.values()


def test_prepare_sees_the_model_before_the_trace() -> None:
    def untie(model: torch.nn.Module) -> None:
        weight = model.get_submodule("lm_head").weight
        model.get_submodule("lm_head").weight = torch.nn.Parameter(torch.empty_like(weight))  # type: ignore[arg-type]

    traced = trace(small(tie_word_embeddings=True), prepare=untie)
    assert ("lm_head.weight",) in traced.parameters.values()


def test_the_config_is_left_alone() -> None:
    config = small()
    before = config.to_dict()
    trace(config)
    assert config.to_dict() == before


# ---- hooks


def test_hooks_are_there_only_while_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)
    with hooks.installed() as name:
        assert name in AttentionInterface._global_mapping
        with pytest.raises(RuntimeError, match="registered already"), hooks.installed():
            pass
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: 1 / 0)
    with pytest.raises(PlancError):
        trace(small())
    assert before == (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping)


PACKED = torch.zeros(1, 4, dtype=torch.long)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (causal_mask_function, ("causal", 0)),
        (sliding_window_causal_mask_function(7), ("sliding", 7)),
        (chunked_causal_mask_function(6, torch.zeros(1)), ("chunked", 6)),
        (and_masks(causal_mask_function, packed_sequence_mask_function(PACKED)), ("causal", 0)),
        (remap_positions_for_packed_sequence(sliding_window_causal_mask_function(7), PACKED), ("sliding", 7)),
    ],
)
def test_mask_kinds(function: Callable[..., Any], expected: tuple[str, int]) -> None:
    assert hooks.classify(function) == expected


@pytest.mark.parametrize(
    "function",
    [
        bidirectional_mask_function,
        sliding_window_bidirectional_mask_function(7),
        and_masks(causal_mask_function, sliding_window_bidirectional_mask_function(7)),
        or_masks(causal_mask_function, sliding_window_causal_mask_function(7)),
        and_masks(sliding_window_causal_mask_function(7), sliding_window_causal_mask_function(5)),
        lambda batch, head, q, k: k <= q,
    ],
)
def test_other_masks_are_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(PlancError, match="attention mask"):
        hooks.classify(function)


def _call_with(monkeypatch: pytest.MonkeyPatch, **keywords: Any) -> None:
    """Makes every attention of the first architecture pass these keywords too."""
    original = modeling_llama.LlamaAttention.forward
    monkeypatch.setattr(
        modeling_llama.LlamaAttention, "forward", lambda self, *args, **kw: original(self, *args, **kw, **keywords)
    )


def test_an_unknown_keyword_of_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _call_with(monkeypatch, indices=torch.zeros(3))
    with pytest.raises(PlancError, match=r"LlamaAttention \(layer 0\): keyword indices=Tensor\(3,\)"):
        trace(small())


def test_benign_and_absent_keywords_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    _call_with(monkeypatch, indices=None, output_attentions=False)
    assert trace(small()).graph


def test_an_attention_without_mask_or_not_causal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **kw: None)
    with pytest.raises(PlancError, match="mask is not a mask that the model asked transformers for"):
        _lift(small())
    monkeypatch.undo()
    _call_with(monkeypatch, is_causal=False)
    with pytest.raises(PlancError, match="not causal"):
        _lift(small())


# ---- models that take less


@pytest.mark.parametrize("arch", ["bloom", "ctrl"])
def test_a_step_gives_the_wanted_rows_of_models_that_take_less(arch: str) -> None:
    model = AutoModelForCausalLM.from_config(coverage(arch), attn_implementation="eager").eval()
    taken = {"position_ids", "logits_to_keep"} & inspect.signature(model.forward).parameters.keys()
    step = Step(model)
    assert (step.positioned, step.keeps) == ("position_ids" in taken, "logits_to_keep" in taken)
    assert step.positioned == (arch != "bloom"), "its own alibi tells tokens apart"
    ids, positions, rows = torch.tensor([[5, 9, 7, 30]]), torch.arange(4)[None], torch.tensor([3, 1])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(step(ids, positions, rows), logits[:, rows])


class _Bare(torch.nn.Module):
    """A model that takes ids and gives all rows: neither positions nor wanted rows are known to it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(9, 4))

    def forward(self, input_ids: torch.Tensor, use_cache: bool = True) -> Any:
        assert not use_cache
        return SimpleNamespace(logits=self.table[input_ids].exp())


def test_a_model_that_knows_neither_positions_nor_rows_is_traced() -> None:
    step = Step(_Bare())
    assert (step.positioned, step.keeps) == (False, False)
    traced = capture("bare", step.to("meta"), {}, tokens=9)
    graph = lift(traced, {"table": load("table", "f32", (9, 4))})
    assert [n.op for n in graph.nodes] == ["embedding", "exp", "take_rows"]
    assert not traced.numbers_tokens


# ---- numbers that a model's code makes, conditions on sizes


def _mlp(monkeypatch: pytest.MonkeyPatch, body: Callable[[torch.Tensor], torch.Tensor]) -> None:
    original = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: original(self, body(x)))


def test_numbers_that_become_tensors_keep_their_value(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        x = x * torch.tensor(0.375, device=x.device) + torch.tensor(3, device=x.device, dtype=x.dtype)
        return torch.where(x > torch.tensor(2, device=x.device), x, torch.tensor(-1.5, device=x.device))

    _mlp(monkeypatch, body)
    graph = _lift(small())
    scalars = [dict(n.attrs).get("scalar") for n in graph.nodes if n.loc.endswith("mlp")]
    assert [s for s in scalars if s in (0.375, 3.0, 2)] == [0.375, 3.0, 2]
    values = [a.item() for a in graph.constants.values() if a.size == 1]
    assert -1.5 in values


def test_a_list_as_an_index_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    _mlp(monkeypatch, lambda x: x + x[:, :, [3, 0]].sum(-1, keepdim=True))
    slices = [(n.attr("start"), n.attr("stop")) for n in _lift(small()).nodes if n.op == "slice" and "mlp" in n.loc]
    assert slices == [(3, 4), (0, 1)]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.tensor([1.0, 2.0], device=x.device)[:1],
        lambda x: torch.as_tensor([1.0, 2.0], device=x.device)[:1],
        lambda x: x.new_tensor([1.0, 2.0])[:1],
    ],
)
def test_lists_that_become_tensors_on_the_models_device_are_refused(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """On meta they have no value: nothing must be made up in its place."""
    _mlp(monkeypatch, lambda x: x * make(x))
    with pytest.raises(PlancError, match=r"constant \S+ of the trace has no value|tracing stopped in"):
        _lift(small())


def test_a_condition_that_holds_for_every_size_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch cannot prove that T * T > T // 2; counts of every kind say so."""

    def body(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[1] * x.shape[1] > x.shape[1] // 2 else x * 3

    _mlp(monkeypatch, body)
    scalars = [dict(n.attrs).get("scalar") for n in _lift(small()).nodes if n.op == "mul" and n.loc.endswith("mlp")]
    assert scalars[0] == 2


@pytest.mark.parametrize(
    "holds",
    [
        lambda n: n * n < 10**9,  # not for long steps
        lambda n: n % 2 == 1 or n < 256,  # not for an even count beyond those that were tried first
        lambda n: n * n > 4,  # not for two tokens
    ],
)
def test_a_condition_that_holds_for_some_sizes_is_refused(
    monkeypatch: pytest.MonkeyPatch, holds: Callable[[Any], bool]
) -> None:
    _mlp(monkeypatch, lambda x: x * 2 if holds(x.shape[1]) else x * 3)
    with pytest.raises(PlancError, match=r"some token counts only|tracing stopped|tokens only"):
        trace(small())


# ---- refusals of the export


def test_a_branch_on_data_names_module_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(x) if x.sum() > 0 else x

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    with pytest.raises(PlancError, match=r"tracing stopped in model.layers.0.mlp \(.*test_trace.py:\d+\): GuardOn"):
        trace(small())


def test_a_trace_for_one_token_count_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: x.view(1, 9, -1) * 2)
    with pytest.raises(PlancError, match="some token counts only"):
        trace(small())


def test_a_trace_for_few_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[1] < 64 else x * 3

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    with pytest.raises(PlancError, match="some token counts only"):
        trace(small())


def test_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.down_proj.weight.add_(1)
        return x

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    with pytest.raises(PlancError, match=r"model.layers.0.mlp.down_proj.weight while it runs"):
        trace(small())


@pytest.mark.parametrize("arch", ["mamba2", "minimax", "rwkv"])
def test_models_with_a_recurrent_state_are_refused(arch: str) -> None:
    message = r"\w+ForCausalLM keeps a recurrent state beside keys and values .*run it with transformers"
    with pytest.raises(PlancError, match=message):
        trace(coverage(arch))


def test_a_model_without_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_bloom.BloomBlock, "forward", lambda self, x, *args, **kwargs: (self.mlp(x, x), None))
    with pytest.raises(PlancError, match="has no attention: neither transformers' interface nor a softmax over tokens"):
        trace(coverage("bloom", n_layer=1))


# ---- size


def _lift(config: Any) -> Any:
    traced = trace(config)
    return lift(traced, {n: load(n, "bf16", tuple(p.shape)) for n, p in traced.module.named_parameters()})


def _large(layers: int) -> tuple[float, float, int]:
    """Seconds, growth of resident memory in MB and nodes of a 70B-shaped model of some layers."""
    config = config_of(
        "llama",
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
    )
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    graph = _lift(config)
    verify(graph, "lift")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return time.perf_counter() - start, (peak - before) / 1024, len(graph.nodes)


def test_a_large_model_of_16_layers_allocates_little() -> None:
    seconds, megabytes, nodes = _large(16)
    assert megabytes < 400
    assert seconds < 60
    assert nodes > 16 * 40


@pytest.mark.slow
def test_a_70b_model_traces_and_lifts_in_a_minute() -> None:
    seconds, megabytes, _ = _large(80)
    assert seconds < 60
    assert megabytes < 1000
