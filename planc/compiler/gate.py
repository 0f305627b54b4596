"""Whether a plan is close enough to its model to be published, and if not, which modules need more bits.

In go measured distances and limits; out comes a verdict, or a storage of weights that is wider where rounding costs
most. A candidate is always built and measured: what is predicted here only says which to try.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from planc.compiler.ir.quant import SCHEMES, base
from planc.compiler.probe import Group
from planc.compiler.storage import AUTO, KINDS
from planc.errors import PlancError, UsageError
from planc.passes.schemes import PLAIN, QuantConfig
from planc.plans.schema import Accuracy, WeightError

ROUNDS = 5  # candidates that are built and measured at most
WORST = 5  # modules that an error names
_AIM = 0.8  # of the limit that a prediction must stay below: modules' KL do not quite add up

# Mean KL in nats, and the share by which perplexity may grow, that a working build of a scheme stays below: twice or
# more of what small models lose, which lose more than large ones. SmolLM2-135M rounded to nearest in groups of 128
# loses 0.37 nats and 26 % (int4-wo), by channel in 8 bits 0.005 nats and 0.5 % (int8-wo). What checkpoints hold in
# mxfp4 is read as it is.
_MOST: Mapping[str, tuple[float, float]] = {
    "f32": (1e-4, 0.005),
    "bf16": (0.1, 0.1),
    "int8-wo": (0.1, 0.1),
    "int8": (0.1, 0.1),
    "fp8": (0.2, 0.15),
    "fp8-block": (0.2, 0.15),
    "awq": (0.7, 0.6),
    "int4": (0.8, 0.7),
    "int4-wo": (1.2, 1.0),
    "mxfp4": (0.2, 0.15),
}
_KV_ADDS: Mapping[str, tuple[float, float]] = {"bf16": (0.01, 0.01), "fp8": (0.05, 0.02), "int8": (0.05, 0.02)}
# What is tried in the place of a scheme, next first; and how much of its KL a storage leaves, against 4 bits.
_WIDER: Mapping[str, tuple[str, ...]] = {"u4": ("int8-wo", "bf16"), "i8": ("bf16",), "f8e4m3": ("bf16",)}
_LEAVES: Mapping[str, float] = {"int8-wo": 1 / 64, "bf16": 0.0}
_BITS: Mapping[str, int] = {"u4": 4, "i8": 8, "f8e4m3": 8}


@dataclass(frozen=True)
class Limits:
    """What a build may lose: mean KL in nats, and the growth of perplexity as a share of the reference's."""

    kl: float
    ppl_increase: float

    def excess(self, a: Accuracy) -> float:
        """How many times over the limits a plan is; up to 1 it passes. NaN counts as beyond every limit."""
        kl, increase = a.mean_kl, ppl_increase(a)
        if kl is None or increase is None:
            return 0.0
        parts = [kl / self.kl if self.kl else kl * float("inf"), 0.0 if increase <= 0 else increase / self.ppl_increase]
        return max(part if part == part else float("inf") for part in parts)


def limits(storage: QuantConfig, kv_dtype: str, most_kl: float | None, most_ppl: float | None) -> Limits:
    """The limits that were asked for, and else those of the widest error among the schemes in use.

    The reference of a quantized checkpoint has its codes too, so where these alone are kept nothing is lost.
    """
    exact = {name for name in storage.native.values() if not SCHEMES[name].act}
    rows = [_MOST["bf16" if name in exact else base(name)] for name in storage.said]
    kl, ppl = (
        max(values) + more for values, more in zip(zip(*rows, strict=True), _KV_ADDS.get(kv_dtype, (0, 0)), strict=True)
    )
    return Limits(kl if most_kl is None else most_kl, ppl if most_ppl is None else most_ppl)


def asked(storage: QuantConfig, kv_dtype: str, most_kl: float | None, most_ppl: str | None) -> Limits:
    """`limits` as the command line has them."""
    return limits(storage, kv_dtype, most_kl, None if most_ppl is None else share(most_ppl))


def check_asked(most_kl: float | None, most_ppl: str | None) -> None:
    """UsageError for limits that mean nothing."""
    if most_kl is not None and not 0 < most_kl < float("inf"):
        raise UsageError(f"--max-kl is {most_kl:g}; pass a number of nats above 0.")
    if most_ppl is not None:
        share(most_ppl)


def share(text: str) -> float:
    """A percentage, with its sign or without, as a share: "2%" and "2" are 0.02. UsageError for what is none."""
    try:
        value = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise UsageError(f"--max-ppl-increase is {text!r}; pass a percentage above 0, such as 2%.")
    return value


def ppl_increase(a: Accuracy) -> float | None:
    """Growth of perplexity over the reference's, as a share; negative where the plan happens to be better."""
    if a.perplexity is None or not a.reference_perplexity:
        return None
    return a.perplexity / a.reference_perplexity - 1


def allowed(a: Accuracy, most: Limits, widened: tuple[str, ...] = ()) -> Accuracy:
    """With what was allowed and widened, where anything was measured."""
    if a.mean_kl is None:
        return a
    return replace(a, most_kl=most.kl, most_ppl_increase=most.ppl_increase, widened=widened)


def told(a: Accuracy, most: Limits) -> str:
    """What was measured and what is allowed."""
    increase = ppl_increase(a)
    assert a.mean_kl is not None
    assert increase is not None
    return (
        f"{a.mean_kl:.3g} nats of KL from its reference (at most {most.kl:g}), perplexity {increase:+.2%} (at most "
        f"+{most.ppl_increase:.2%})"
    )


def worst(found: Sequence[Group], errors: Iterable[WeightError]) -> list[str]:
    """The modules that cost most, with the KL of rounding them alone; without a probe, with their relative error."""
    if found:
        ranked = sorted(found, key=lambda g: -g.kl)[:WORST]
        return [f"{_short(g.modules)} ({g.kl:.2g} nats)" for g in ranked]
    by_error = sorted(errors, key=lambda e: -e.error)[:WORST]
    return [f"{_short(e.modules)} (error {e.error:.2g})" for e in by_error]


def _short(modules: Sequence[str]) -> str:
    """Modules of one parent in one name: `model.layers.0.self_attn.q_proj+k_proj`."""
    parents: dict[str, list[str]] = {}
    for module in modules:
        parent, _, own = module.rpartition(".")
        parents.setdefault(parent, []).append(own)
    return ", ".join(f"{parent}.{'+'.join(own)}" if parent else "+".join(own) for parent, own in parents.items())


@dataclass
class Search:
    """Which scheme each group should have so that a build passes: the state between one measured build and the next."""

    base: QuantConfig
    most: Limits
    groups: list[Group]
    levels: dict[int, int]
    scale: float = 1.0  # measured excess over that of the sum of the groups' KL
    failed: int = 0  # proposals that did not pass

    @classmethod
    def start(cls, base: QuantConfig, most: Limits, found: Sequence[Group], excess: float) -> "Search":
        """`excess` is that of the build in which nothing is widened yet."""
        kept = [g for g in found if g.kl > 0]
        search = cls(base, most, kept, dict.fromkeys(range(len(kept)), 0))
        search.scale = excess / search._sum() if kept else 0.0
        return search

    def measured(self, excess: float) -> None:
        """Takes what the last proposal came to."""
        predicted = self._sum()
        self.failed += 1
        if predicted:
            self.scale = max(self.scale, excess / predicted)

    def widen(self) -> bool:
        """Moves groups to wider schemes until the prediction passes, dearest KL for its bytes first; one at least, and
        all that there are in the last round.

        False when nothing is left to widen.
        """
        moved, aim = False, _AIM * 0.5**self.failed if self.failed < ROUNDS - 1 else -1.0
        while not moved or self._sum() * self.scale > aim:
            steps = [i for i, g in enumerate(self.groups) if self.levels[i] < len(_ladder(g))]
            if not steps:
                return moved
            best = max(steps, key=self._gain)
            self.levels[best] += 1
            moved = True
        return moved

    @property
    def widened(self) -> dict[str, list[str]]:
        """Modules by the wider scheme that they get."""
        found: dict[str, list[str]] = {}
        for i, g in enumerate(self.groups):
            if self.levels[i]:
                found.setdefault(_ladder(g)[self.levels[i] - 1], []).extend(g.modules)
        return found

    @property
    def names(self) -> set[str]:
        """Names of the weights that are widened."""
        return {w.name.removesuffix(".q") for i, g in enumerate(self.groups) if self.levels[i] for w in g.weights}

    @property
    def storage(self) -> QuantConfig:
        """The base with the widened modules ahead of what was said before."""
        ahead = tuple((p, name) for name, modules in self.widened.items() for p in patterns(modules))
        return replace(self.base, modules=(*ahead, *self.base.modules))

    def _sum(self) -> float:
        return sum(g.kl * _left(g, self.levels[i]) for i, g in enumerate(self.groups))

    def _gain(self, i: int) -> float:
        """KL that the next step of a group saves for each bit that it costs."""
        g, level = self.groups[i], self.levels[i]
        saved = g.kl * (_left(g, level) - _left(g, level + 1))
        return saved / ((_bits(g, level + 1) - _bits(g, level)) * g.size)


def _ladder(g: Group) -> tuple[str, ...]:
    return _WIDER[g.weights[0].scheme.codes]


def _left(g: Group, level: int) -> float:
    return _LEAVES[_ladder(g)[level - 1]] if level else 1.0


def _bits(g: Group, level: int) -> int:
    name = _ladder(g)[level - 1] if level else g.weights[0].scheme.name
    return 16 if name in PLAIN else _BITS[SCHEMES[name].codes]


def patterns(modules: Sequence[str]) -> list[str]:
    """Regular expressions over tensor names that match just these modules, one for all layers of a kind."""
    layers: dict[tuple[str, str], list[str]] = {}
    for module in dict.fromkeys(modules):
        words = module.split(".")
        at = next((i for i, word in enumerate(words) if word.isdigit()), len(words))
        key = (".".join(words[:at]), ".".join(words[at + 1 :]))
        layers.setdefault(key, []).append(words[at] if at < len(words) else "")
    return [_pattern(head, numbers, tail) for (head, tail), numbers in layers.items()]


def _pattern(head: str, numbers: Sequence[str], tail: str) -> str:
    layers = numbers[0] if len(numbers) == 1 else f"({'|'.join(numbers)})"
    words = [_escaped(head), layers, _escaped(tail)]
    return "^" + r"\.".join(word for word in words if word) + r"(\.|$)"


def _escaped(words: str) -> str:
    return r"\.".join(r"\d+" if word == "*" else re.escape(word) for word in words.split("."))


def as_json(storage: QuantConfig) -> str:
    """A storage as a file for --quant-config."""
    held = {*storage.native.values()}  # of several schemes, or of one that no file can ask for, auto alone keeps codes
    kept = not held or (held == {storage.default} and not SCHEMES[storage.default].read_only)
    said = {"default": storage.default if kept else AUTO}
    own = storage.asked if held else storage.kinds.keys()
    said |= {field: storage.kinds[kind] for field, kind in KINDS.items() if kind in own}
    return json.dumps(said | {"modules": dict(storage.modules)}, indent=1)


def refuse_ranks(a: Accuracy, most: Limits, scheme: str) -> PlancError:
    """The error of a build of several ranks: what would pass is looked for in plans of one."""
    found = f" Worst: {'; '.join(worst((), a.weights))}." if a.weights else ""
    return PlancError(
        f"the {scheme} plan is {told(a, most)}, so it was not published.{found} Build it with --tp 1, which looks for "
        "what to store wider, and give what it prints to --tp in a --quant-config; or choose a wider --dtype."
    )


def refuse_packed(a: Accuracy, most: Limits, scheme: str) -> PlancError:
    """The error of packing: what is too far with these weights is for a build to make better."""
    found = f" Worst: {'; '.join(worst((), a.weights))}." if a.weights else ""
    return PlancError(
        f"with these weights the {scheme} plan is {told(a, most)}, so it was not packed.{found} `planc build` of this "
        "model calibrates, and looks for what to store wider; --max-kl and --max-ppl-increase allow more."
    )


def refuse(a: Accuracy, most: Limits, found: Sequence[Group], mixed: QuantConfig | None, scheme: str) -> PlancError:
    """The error of a build that is too far from its model; `mixed` is a storage that was measured to pass."""
    lines = f"the {scheme} plan is {told(a, most)}, so it was not published."
    if not a.weights:
        return PlancError(
            f"{lines} Rounding cannot explain that: please report the model; --reference none skips this."
        )
    lines += f" Worst: {'; '.join(worst(found, a.weights))}."
    if mixed is None:
        return PlancError(f"{lines} No wider storage of single modules passes; choose a wider --dtype, or allow more.")
    return PlancError(f"{lines} Build with --quant-config and the file printed above, which passes, or --auto-mixed.")
