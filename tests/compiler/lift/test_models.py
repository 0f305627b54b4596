"""Tiny models of many architectures: the lifted graph, interpreted, against transformers; and what must be caught."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from planc.compiler.ir.graph import Graph
from planc.compiler.ir.recipe import load, step
from planc.compiler.ir.text import parse, to_text
from planc.compiler.ir.verify import verify
from planc.compiler.lift import lift, pointwise, products, table, tokens
from planc.compiler.lift.call import Call
from planc.compiler.lift.form import Form
from planc.compiler.lift.leaves import conserve
from planc.compiler.trace import Traced, trace
from planc.errors import PlancError
from tests.compiler.lift.capture import recipes, run
from tests.models import ARCHS, WINDOW, config_of, random_model

TOKENS = 70  # the trace saw 9
MORE: dict[str, dict[str, Any]] = {
    "gemma": dict(head_dim=16),
    "granite": dict(embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.22, attention_multiplier=0.06),
    "cohere": {},
    "cohere2": dict(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]),
    "olmo": dict(clip_qkv=0.5),
    "olmo2": {},
    "glm": dict(head_dim=16, partial_rotary_factor=0.5),
    "smollm3": dict(no_rope_layers=[1, 0]),
    "starcoder2": dict(sliding_window=WINDOW),
    "stablelm": dict(partial_rotary_factor=0.25, qk_layernorm=True),
    "opt": dict(ffn_dim=96, word_embed_proj_dim=64, dropout=0.0),
    "phi": dict(partial_rotary_factor=0.5, qk_layernorm=True, num_key_value_heads=4),
}
SLOW = {"cohere", "starcoder2", "stablelm", "phi"}  # nothing that the others do not show


def _layers(fields: dict[str, Any]) -> int:
    """One layer shows all of a model whose layers are alike."""
    return max([1, *(len(v) for v in fields.values() if isinstance(v, list))])


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{arch: (arch, {}) for arch in ARCHS},
    **{arch: (arch, {"num_hidden_layers": _layers(fields)} | fields) for arch, fields in MORE.items()},
    "llama tied, biases, one kv head": (
        "llama",
        dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True, num_key_value_heads=1),
    ),
    "qwen2 sliding": ("qwen2", dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)),
}


@cache
def plain() -> tuple[Graph, nn.Module]:
    """The first architecture, for tests that only look."""
    return lifted("llama")


_TRACES: dict[str, Traced] = {}


def traced(arch: str, **fields: Any) -> Traced:
    """The trace of a tiny model, made once: the lift only reads it."""
    key = repr((arch, sorted(fields.items())))
    if key not in _TRACES:
        _TRACES[key] = trace(config_of(arch, **fields))
    return _TRACES[key]


def lifted(arch: str, **fields: Any) -> tuple[Graph, nn.Module]:
    """The lifted graph of a tiny model, and its eager module with the weights that the graph's recipes read."""
    model = random_model(config_of(arch, **fields))
    made = lift(traced(arch, **fields), recipes(model))
    verify(made, "lift")
    return made, model


def error(made: Graph, model: nn.Module, seed: int = 0) -> float:
    """Largest difference of some rows' logits over the largest logit, at irregular positions; NaN stays NaN."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 300, (1, TOKENS), generator=generator)
    positions = torch.randperm(250, generator=generator)[:TOKENS].sort().values[None]
    rows = torch.tensor([TOKENS - 1, 0, 40, 3])
    with torch.no_grad():
        ones = torch.ones_like(ids)
        out = model(input_ids=ids, position_ids=positions, attention_mask=ones, use_cache=False)
    theirs = out.logits[0, rows].numpy()
    return float(np.abs(run(made, model.state_dict(), ids, positions, rows) - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in VARIANTS])
def test_lifted_graph_equals_transformers(name: str) -> None:
    arch, fields = VARIANTS[name]
    made, model = lifted(arch, **fields)
    assert error(made, model) <= 1e-5
    assert parse(to_text(made)) == made
    assert made.types["logits"].shape == ("R", model.config.vocab_size)


def test_rows_are_taken_before_the_head() -> None:
    graph = plain()[0]
    (head,) = [n for n in graph.nodes if n.out.name == "logits"]
    assert head.op == "linear"
    assert graph.producers[head.inputs[0]].op == "take_rows"


def test_names_and_places_are_readable() -> None:
    graph = plain()[0]
    assert graph.producers["l1.self_attn.q_proj"].loc == "model.layers.1.self_attn.q_proj"
    assert {"l0.mlp.up_proj.weight", "embed_tokens.weight", "lm_head.weight"} <= set(graph.weight_by_name)


# ---- conservation


def test_every_parameter_is_one_weight() -> None:
    made, model = lifted("qwen2")
    loads = Counter(name for w in made.weights for name in w.recipe.loads)
    assert loads == Counter(name for name, _ in model.named_parameters())
    assert sum(name.endswith("q_proj.bias") for name in loads) == model.config.num_hidden_layers


def test_tied_parameters_are_one_weight() -> None:
    graph = lifted("llama", tie_word_embeddings=True)[0]
    (table_,) = [w for w in graph.weights if "embed" in w.name or "head" in w.name]
    assert {n.op for n in graph.users[table_.name]} == {"embedding", "linear"}


def test_stored_dtype_is_cast_and_checkpoint_names_are_used() -> None:
    graph = lift(traced("llama"), recipes(traced("llama").module, "bf16", "language."))
    recipe = graph.weight_by_name["l0.mlp.up_proj.weight"].recipe
    assert recipe.op == "cast"
    assert recipe.loads == ("language.model.layers.0.mlp.up_proj.weight",)


def test_a_recipe_of_several_tensors_is_cast_at_its_leaves() -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    model = traced("llama").module
    whole = tuple(model.get_parameter(name).shape)
    halves = [load(part, "bf16", (whole[0] // 2, whole[1])) for part in "ab"]
    graph = lift(traced("llama"), recipes(model) | {name: step("concat", *halves, axis=0)})
    recipe = graph.weight_by_name["l0.mlp.up_proj.weight"].recipe
    assert recipe.op == "concat"
    assert [r.op for r in recipe.inputs] == ["cast", "cast"]


def test_a_parameter_that_shares_its_tensor_with_another_is_missed() -> None:
    """q and k are rows of one tensor: the tensor is still read when the graph has lost k."""
    made = traced("llama")
    names = [f"model.layers.0.self_attn.{part}.weight" for part in ("k_proj", "v_proj")]
    rows = made.module.get_parameter(names[0]).shape[0]
    both = load("kv", "f32", (2 * rows, made.module.get_parameter(names[0]).shape[1]))
    shared = {n: step("slice", both, axis=0, start=i * rows, stop=(i + 1) * rows) for i, n in enumerate(names)}
    full = recipes(made.module) | shared
    graph = lift(made, full)
    conserve(made, graph, full)
    (lost,) = [w for w in graph.weights if w.recipe == shared[names[0]]]
    with pytest.raises(PlancError, match=r"layers.0.self_attn.k_proj.weight is used by the model and lost"):
        conserve(made, replace(graph, weights=tuple(w for w in graph.weights if w != lost)), full)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("model.norm.weight"), "no tensor for parameter model.norm.weight"),
        (
            lambda r: r.update({"model.norm.weight": load("norm", "f32", (65,))}),
            r"\(norm\) makes model.norm.weight \(65,\), .*\(64,\)",
        ),
    ],
)
def test_missing_and_misshapen_tensors_are_refused(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    full = recipes(traced("llama").module)
    change(full)
    with pytest.raises(PlancError, match=message):
        lift(traced("llama"), full)


@pytest.mark.parametrize(
    ("arch", "fields", "kinds"),
    [
        ("mistral", {}, [("sliding", WINDOW)] * 2),
        (
            "qwen2",
            dict(use_sliding_window=True, sliding_window=7, max_window_layers=1),
            [("causal", 0), ("sliding", 7)],
        ),
        ("gemma3_text", {}, [("sliding", WINDOW), ("causal", 0)]),
        ("llama", {}, [("causal", 0)] * 2),
    ],
)
def test_windows_come_from_the_mask_of_each_layer(
    arch: str, fields: dict[str, Any], kinds: list[tuple[str, int]]
) -> None:
    nodes = [n for n in lifted(arch, **fields)[0].nodes if n.op == "attention"]
    assert [(n.attr("kind"), n.attr("window")) for n in nodes] == kinds
    assert [n.attr("layer") for n in nodes] == [0, 1]


def test_scale_and_softcap_are_kept() -> None:
    (node, _) = [n for n in lifted("gemma2")[0].nodes if n.op == "attention"]
    assert (node.attr("scale"), node.attr("softcap")) == (24**-0.5, 3.0)


# ---- negative controls: each of these mistakes must be caught


def _with_rule(monkeypatch: pytest.MonkeyPatch, target: object, rule: Callable[[Call], Form]) -> None:
    monkeypatch.setitem(table.RULES, target, rule)  # type: ignore[arg-type]


def test_a_rule_that_drops_the_bias_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_bias(call: Call) -> Form:
        return products._linear(call, call.form("input"), call.form("weight"), None, call.dims)

    _with_rule(monkeypatch, torch.ops.aten.linear.default, without_bias)
    with pytest.raises(PlancError, match=r"q_proj .*argument bias would be lost"):
        lifted("qwen2", num_hidden_layers=1)


def test_a_bias_read_and_then_lost_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_bias(call: Call) -> Form:
        call.implied("bias")
        return products._linear(call, call.form("input"), call.form("weight"), None, call.dims)

    _with_rule(monkeypatch, torch.ops.aten.linear.default, without_bias)
    with pytest.raises(PlancError, match=r"parameter model.layers.0.self_attn.q_proj.bias is used .* lost"):
        lifted("qwen2", num_hidden_layers=1)


def test_an_ignored_window_changes_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_mask", lambda call: (call.implied("mask", "window", "causal"), ("causal", 0))[1])
    assert error(*lifted("mistral", num_hidden_layers=1)) > 1e-3


def test_a_wrong_eps_changes_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    original = pointwise.binary("add")

    def add(call: Call) -> Form:
        wrong = call._args["other"] == 1e-6
        call._args |= {"other": 1e-3} if wrong else {}
        return original(call)

    _with_rule(monkeypatch, torch.ops.aten.add.Tensor, add)
    assert error(*lifted("llama", num_hidden_layers=1, rms_norm_eps=1e-6)) > 1e-4


def test_swapped_halves_of_the_rotation_change_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_rule(monkeypatch, torch.ops.aten.neg.default, lambda call: call.form("self"))
    assert error(*lifted("llama", num_hidden_layers=1)) > 1e-2


def test_a_wrong_angle_changes_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_rule(monkeypatch, torch.ops.aten.cos.default, pointwise.unary("sin"))
    assert error(*lifted("llama", num_hidden_layers=1)) > 1e-2


def test_keyword_and_mask_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.mistral import modeling_mistral as code

    monkeypatch.setattr(code, "create_sliding_window_causal_mask", code.create_causal_mask)
    with pytest.raises(PlancError, match=r"keyword says a sliding window of 5, the mask says causal"):
        lifted("mistral", num_hidden_layers=1, rms_norm_eps=1e-4)  # a config of its own, traced under the patch
