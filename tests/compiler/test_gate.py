"""The gate without a build: limits, what is too far, and the search on costs that are known."""

import json
import math
import re
from dataclasses import dataclass

import pytest

from planc.compiler import gate
from planc.compiler.gate import Limits, Search
from planc.compiler.ir.quant import SCHEMES
from planc.compiler.ir.recipe import load, step
from planc.compiler.probe import Group, groups
from planc.compiler.storage import NAMES
from planc.compiler.weight_errors import Quantized
from planc.errors import UsageError
from planc.passes.schemes import QuantConfig
from planc.plans.schema import Accuracy, WeightError

LIMITS = Limits(0.1, 0.05)


def measured(kl: float, ppl: float = 10.0) -> Accuracy:
    return Accuracy("transformers f32", "00", 100, kl, 0.9, ppl, 10.0)


def weight(layer: int, *modules: str, scheme: str = "int4-wo", size: int = 64) -> Quantized:
    loads = [load(f"model.layers.{layer}.{m}.weight", "f32", (size // len(modules), 128)) for m in modules]
    wide = loads[0] if len(loads) == 1 else step("concat", *loads, axis=0)
    return Quantized(f"l{layer}.{'+'.join(modules)}.q", "linear", SCHEMES[scheme], wide, None)


def group(kl: float, layer: int, *modules: str, **options: object) -> Group:
    return Group((weight(layer, *modules, **options),), kl)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("accuracy", "excess"),
    [
        (measured(0.05), 0.5),
        (measured(0.2), 2.0),
        (measured(0.0, 11.0), 2.0),
        (measured(0.05, 9.0), 0.5),  # better than the reference by chance
        (measured(math.nan), math.inf),
        (measured(0.0, math.nan), math.inf),
        (measured(math.inf), math.inf),
        (Accuracy("none"), 0.0),
    ],
)
def test_excess_is_the_worse_of_both_limits(accuracy: Accuracy, excess: float) -> None:
    assert LIMITS.excess(accuracy) == pytest.approx(excess)


def test_every_storage_has_limits_and_mixtures_take_the_widest() -> None:
    for name in NAMES:
        if name != "auto":
            assert 0 < gate.limits(QuantConfig(name), "bf16", None, None).kl < 10
    of = lambda config, kv="bf16": gate.limits(config, kv, None, None)  # noqa: E731
    int8, int4 = of(QuantConfig("int8")), of(QuantConfig("int4-wo-g32"))
    assert int8.kl < int4.kl
    assert of(QuantConfig("int8", (("x", "int4-wo-g32"),))) == int4
    assert of(QuantConfig("int8", (), {"head": "bf16"})) == int8
    assert of(QuantConfig("int8"), "fp8").kl > int8.kl
    assert gate.limits(QuantConfig("int8"), "fp8", 0.01, 0.02) == Limits(0.01, 0.02)


def test_codes_that_a_checkpoint_holds_may_cost_no_more_than_bf16() -> None:
    of = lambda config: gate.limits(config, "bf16", None, None)  # noqa: E731
    bf16 = of(QuantConfig("bf16"))
    assert of(QuantConfig("awq-g64", native={"q": "awq-g64"})) == bf16
    assert of(QuantConfig("int4-wo-g32", kinds={"head": "bf16"}, native={"q": "int4-wo-g32"})) == bf16
    assert of(QuantConfig("fp8", native={"q": "fp8"})) == of(QuantConfig("fp8"))  # activations are rounded still
    assert of(QuantConfig("awq-g64", (("up", "int4-wo"),), native={"q": "awq-g64"})) == of(QuantConfig("int4-wo"))


def test_a_percentage_is_read_with_its_sign_and_without() -> None:
    assert gate.share("2%") == gate.share("2") == gate.share(" 2 % ") == 0.02
    assert gate.share("0.5") == 0.005
    for wrong in ("", "%", "-1", "0", "two", "nan", "inf"):
        with pytest.raises(UsageError, match="--max-ppl-increase"):
            gate.share(wrong)


def test_patterns_match_the_modules_and_no_other() -> None:
    modules = [
        "model.layers.1.self_attn.q_proj",
        "model.layers.11.self_attn.q_proj",
        "model.layers.1.mlp.experts.*.up_proj",
        "lm_head",
        "h.0.attn.c_attn",
    ]
    made = gate.patterns(modules)
    assert len(made) == 4
    yes = [
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.11.self_attn.q_proj.weight",
        "model.layers.1.mlp.experts.7.up_proj.weight",
        "lm_head.weight",
        "h.0.attn.c_attn.weight",
        "lm_head",
    ]
    no = [
        "model.layers.2.self_attn.q_proj.weight",
        "model.layers.111.self_attn.q_proj.weight",
        "model.layers.1.self_attn.q_proj_norm.weight",
        "model.layers.1.mlp.experts.7.up_proj_bias",
        "xlm_head.weight",
        "model.layers.10.self_attn.q_proj.weight",
        "h.0.attnxc_attn.weight",
    ]
    assert [any(re.search(p, name) for p in made) for name in yes] == [True] * len(yes)
    assert [any(re.search(p, name) for p in made) for name in no] == [False] * len(no)


def test_the_dearest_groups_for_their_size_are_widened_first() -> None:
    found = [group(0.01, 0, "a"), group(0.5, 1, "a"), group(0.3, 2, "a"), group(0.6, 3, "a", size=640)]
    search = Search.start(QuantConfig("int4-wo"), Limits(0.95, 1.0), found, excess=1.41 / 0.95)
    assert search.widen()
    assert search.widened == {"int8-wo": ["model.layers.1.a", "model.layers.2.a"]}
    assert search.names == {"l1.a", "l2.a"}
    storage = search.storage
    assert [storage._said((f"model.layers.{n}.a.weight",)) for n in range(4)] == [None, "int8-wo", "int8-wo", None]


@dataclass
class World:
    """What builds would come to: the sum of the groups' KL, times something that the search cannot know."""

    found: list[Group]
    factor: float
    left: dict[str, float]

    def excess(self, search: Search, most: Limits) -> float:
        total = sum(
            g.kl * (self.left[gate._ladder(g)[search.levels[i] - 1]] if search.levels[i] else 1.0)
            for i, g in enumerate(search.groups)
        )
        return total * self.factor / most.kl


@pytest.mark.parametrize("factor", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("most", [2.0, 0.1, 0.01, 0.0005])
@pytest.mark.parametrize("scheme", ["int4-wo", "fp8"])
def test_the_search_ends_where_the_limit_is_kept(factor: float, most: float, scheme: str) -> None:
    found = [group(0.1 / (1 + n), n, "a", scheme=scheme) for n in range(24)]
    world = World(found, factor, {"int8-wo": 1 / 40, "bf16": 0.0})
    limits = Limits(most, 1.0)
    first = sum(g.kl for g in found) * factor / most
    if first <= 1:
        return
    search = Search.start(QuantConfig(scheme), limits, found, first)
    rounds, excess = 0, first
    while excess > 1:
        assert search.widen(), "nothing left to widen"
        excess = world.excess(search, limits)
        search.measured(excess)
        rounds += 1
    assert rounds <= gate.ROUNDS
    wide = sum(map(len, search.widened.values()))
    assert wide < 24 or most < 0.1, "not everything, where the limit leaves room"


def test_the_search_says_when_nothing_is_left() -> None:
    search = Search.start(QuantConfig("int8-wo"), LIMITS, [group(0.5, 0, "a", scheme="int8-wo")], 5.0)
    assert search.widen()
    assert not search.widen()
    assert not Search.start(QuantConfig("int8-wo"), LIMITS, [], 5.0).widen()


def test_deep_models_are_measured_in_bands_of_equal_weights() -> None:
    weights = [weight(n, m) for n in range(80) for m in ("a", "b", "c")]
    made = groups(weights)
    assert len(made) <= 64
    assert sorted(w.name for g in made for w in g) == sorted(w.name for w in weights)
    assert {len({w.modules[0].rpartition(".")[2] for w in g}) for g in made} == {1}
    assert len(groups(weights[:30])) == 30


def test_the_file_is_the_config_that_was_found() -> None:
    base = QuantConfig("awq-g64", (("mine", "int8"),), {"head": "bf16"})
    search = Search.start(base, LIMITS, [group(0.5, 3, "q", "k", scheme="awq-g64")], 5.0)
    search.widen()
    said = json.loads(gate.as_json(search.storage))
    assert said["default"] == "awq-g64"
    assert said["lm_head"] == "bf16"
    assert list(said["modules"])[-1] == "mine"
    assert len(said["modules"]) == 3


def test_the_error_names_the_worst_modules_and_the_next_step() -> None:
    found = [group(0.1 * n, n, "self_attn.q_proj", "self_attn.k_proj") for n in range(1, 8)]
    errors = tuple(WeightError(w.modules, "linear", "int4-wo", 0.1) for g in found for w in g.weights)
    a = Accuracy("r", "0", 9, 0.7, 0.8, 12.0, 10.0, weights=errors)
    told = str(gate.refuse(a, LIMITS, found, QuantConfig("int4-wo"), "int4-wo"))
    assert "0.7 nats of KL from its reference (at most 0.1), perplexity +20.00% (at most +5.00%)" in told
    assert "Worst: model.layers.7.self_attn.q_proj+k_proj (0.7 nats); model.layers.6." in told
    assert "layers.2." not in told, "five are named"
    assert "--quant-config" in told
    assert "--auto-mixed" in told
    assert "No wider storage" in str(gate.refuse(a, LIMITS, found, None, "int4-wo"))
    plain = Accuracy("r", "0", 9, 0.7, 0.8, 12.0, 10.0)
    assert "report the model" in str(gate.refuse(plain, LIMITS, [], None, "bf16"))


def test_a_file_for_a_checkpoint_that_holds_codes_keeps_them() -> None:
    for held, default in (({"q4_1"}, "auto"), ({"int4-wo-g32", "q6_k"}, "auto"), ({"awq-g64"}, "awq-g64")):
        native = dict(zip("ab", sorted(held), strict=False))
        storage = QuantConfig(sorted(held)[0], (("x", "bf16"),), native=native)
        assert json.loads(gate.as_json(storage)) == {"default": default, "modules": {"x": "bf16"}}
