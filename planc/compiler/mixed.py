"""A build that is too far from its model: in goes how to build another, out comes one that passes, or what would."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from planc.codegen import target as targets
from planc.compiler import gate
from planc.compiler.gate import Limits, Search
from planc.compiler.ir.graph import Graph
from planc.compiler.probe import Group, Probe, groups
from planc.compiler.progress import Progress
from planc.compiler.source import ModelSource
from planc.compiler.weight_errors import quantized
from planc.passes.options import Options
from planc.plans.schema import Plan

_EXACT = 1 << 30  # elements up to which the wide plan is float32: it lies on the disk while modules are measured


@dataclass(frozen=True)
class Attempt:
    """A plan that lies in a directory, and what made it."""

    options: Options
    graph: Graph
    plan: Plan


# Writes the plan of some options to a directory that has a tokenizer; with True it is measured too.
Make = Callable[[Path, Options, bool], Attempt]


def passing(
    first: Attempt,
    most: Limits,
    root: Path,
    make: Make,
    source: ModelSource,
    text: Sequence[int],
    auto: bool,
    progress: Progress,
) -> Attempt:
    """`first`, which lies in `root`, when it is within the limits; else, with `auto`, one that is, in its place.

    Raises PlancError naming the worst modules; without `auto` it has printed a --quant-config that was built, measured
    and found to pass, if there is one. `text` are some tokens to measure single modules on.
    """
    excess = most.excess(first.plan.accuracy)
    if excess <= 1:
        return _kept(first, most, ())
    if first.options.tp > 1:  # single modules are measured in plans of one rank
        raise gate.refuse_ranks(first.plan.accuracy, most, first.options.dtype)
    progress.say(f"the {first.options.dtype} plan is {gate.told(first.plan.accuracy, most)}: looking for what helps")
    found = _costs(first, root, make, source, text, progress)
    search = Search.start(first.options.storage, most, found, excess)
    for number in range(1, gate.ROUNDS + 1):
        if not search.widen():
            break
        with _beside(root) as place:
            attempt = make(place, _options(first.options, search), True)
            wider = ", ".join(f"{len(modules)} in {name}" for name, modules in search.widened.items())
            progress.say(f"round {number}: of the modules {wider}: {gate.told(attempt.plan.accuracy, most)}")
            excess = most.excess(attempt.plan.accuracy)
            if excess <= 1:
                passed = _passed(first, attempt, search, most, found, auto, progress)
                _move(place, root)
                return passed
        search.measured(excess)
    raise gate.refuse(first.plan.accuracy, most, found, None, first.options.dtype)


@contextmanager
def _beside(root: Path) -> Iterator[Path]:
    """A directory for another attempt with the tokenizer of `root`: never `root` itself, for a library that was loaded
    from a path is what that path gives from then on.
    """
    with tempfile.TemporaryDirectory(prefix=".planc-", suffix=".building", dir=root.parent) as scratch:
        (Path(scratch) / "tokenizer").symlink_to((root / "tokenizer").resolve())
        yield Path(scratch)


def _move(place: Path, root: Path) -> None:
    """The attempt in `place` takes the place of that in `root`."""
    for made in place.iterdir():
        if made.name == "tokenizer":
            continue
        old = root / made.name
        if old.is_dir():
            shutil.rmtree(old)
        made.rename(old)


def _passed(
    first: Attempt,
    attempt: Attempt,
    search: Search,
    most: Limits,
    found: Sequence[Group],
    auto: bool,
    progress: Progress,
) -> Attempt:
    progress.say(gate.as_json(search.storage))
    if not auto:
        raise gate.refuse(first.plan.accuracy, most, found, search.storage, first.options.dtype)
    names = sorted(f"{module}: {name}" for name, modules in search.widened.items() for module in modules)
    return _kept(attempt, most, tuple(names))


def _kept(attempt: Attempt, most: Limits, widened: tuple[str, ...]) -> Attempt:
    """With what was allowed and widened in the manifest."""
    accuracy = gate.allowed(attempt.plan.accuracy, most, widened)
    return replace(attempt, plan=replace(attempt.plan, accuracy=accuracy))


def _options(options: Options, search: Search) -> Options:
    """With the search's storage; bounds found for a scheme go with it."""
    return replace(options, quant=search.storage, choices=options.choices.without(search.names))


def _costs(
    first: Attempt, root: Path, make: Make, source: ModelSource, text: Sequence[int], progress: Progress
) -> list[Group]:
    """What rounding each group of weights costs by itself, in a plan of wide weights for this CPU."""
    weights = quantized(first.graph)
    if not weights:
        return []
    dtype = "f32" if sum(w.size for w in weights) <= _EXACT else "bf16"
    plain = replace(first.options.storage, default=dtype, modules=(), kinds={}, native={})
    with _beside(root) as place:
        wide = make(place, replace(first.options, target=targets.host(), dtype=dtype, quant=plain), False)
        bar = progress.rows("modules", len(groups(weights)))
        constants = first.graph.constants
        with Probe(place, wide.plan, wide.graph, constants, source.read, source.read_rows) as probe:
            return probe.measure(weights, text, bar)
