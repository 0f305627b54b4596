"""Targets: in goes text such as `cpu:x86-64-v4+vnni`, out come kind, arch, features and compiler flags."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass

from planc.errors import UsageError
from planc.plans.host import CPU_FLAGS, cpu_flags

# Level -> flags of the C++ compiler. `portable` is the compiler's own baseline, on any architecture.
_LEVELS: Mapping[str, tuple[str, ...]] = {
    "portable": ("-DPLANC_PORTABLE",),
    "x86-64-v3": ("-march=x86-64-v3",),
    "x86-64-v4": ("-march=x86-64-v4",),
}
# Extra -> compiler flags, and the level that it builds on.
_EXTRAS: Mapping[str, tuple[str, ...]] = {
    "vnni": ("-mavx512vnni",),
    "bf16": ("-mavx512bf16",),
    "amx": ("-mamx-tile", "-mamx-int8", "-mamx-bf16"),
}
_BASE_OF_EXTRAS = "x86-64-v4"


@dataclass(frozen=True)
class Target:
    """A machine to build for: kind (`cpu`), arch (an ISA level) and features (extras, sorted)."""

    kind: str
    arch: str
    features: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}:" + "+".join((self.arch, *self.features))

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags that make the C++ compiler use this ISA and nothing beyond it."""
        return (*_LEVELS[self.arch], *(flag for f in self.features for flag in _EXTRAS[f]))


def parse(text: str) -> Target:
    """The target that `text` names; `cpu` alone is the best level of this machine. UsageError lists what is known."""
    kind, _, isa = text.partition(":")
    if kind != "cpu":
        raise UsageError(f"unknown target {text!r}; known: {', '.join(known())}")
    if not isa:
        return host()
    arch, *features = isa.split("+")
    unknown = [arch] if arch not in _LEVELS else [f for f in features if f not in _EXTRAS]
    if unknown:
        raise UsageError(f"target {text!r} names {unknown[0]!r}, which is not known; known: {', '.join(known())}")
    if features and arch != _BASE_OF_EXTRAS:
        raise UsageError(f"target {text!r}: +{features[0]} builds on cpu:{_BASE_OF_EXTRAS}, not on {arch}")
    return Target(kind, arch, tuple(sorted(set(features))))


def known() -> tuple[str, ...]:
    """Every form of a target's name."""
    extras = "".join(f"[+{e}]" for e in _EXTRAS)
    return ("cpu", *(f"cpu:{a}" + (extras if a == _BASE_OF_EXTRAS else "") for a in _LEVELS))


def host() -> Target:
    """The best level that this machine runs, by the feature flags of its CPU.

    Extras are left out: no kernel uses them yet, and a plan that asks for them would be refused elsewhere for nothing.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return Target("cpu", "portable")
    have = cpu_flags()
    level = next((a for a in ("x86-64-v4", "x86-64-v3") if have.issuperset(CPU_FLAGS[a])), "portable")
    return Target("cpu", level)
