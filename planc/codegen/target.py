"""Targets: in goes text such as `cpu:x86-64-v4+vnni` or `h100-sxm`, out come kind, arch, features, what it can do."""

import difflib
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from planc.codegen.skus import SKU, SM, SMS, skus
from planc.compiler.ir.quant import SCHEMES
from planc.errors import UsageError
from planc.plans.host import CPU_FLAGS, cpu_flags

# Level -> flags of the C++ compiler. `portable` is the compiler's own baseline, on any architecture.
_LEVELS: Mapping[str, tuple[str, ...]] = {
    "portable": ("-DPLANC_PORTABLE",),
    "x86-64-v3": ("-march=x86-64-v3",),
    "x86-64-v4": ("-march=x86-64-v4",),
}
# Level -> the extras that build on it, each with its compiler flags.
_EXTRAS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "portable": {},
    "x86-64-v3": {"avxvnni": ("-mavxvnni",)},
    "x86-64-v4": {
        "vnni": ("-mavx512vnni",),
        "bf16": ("-mavx512bf16", "-mavx512vnni"),  # every CPU that has the first has the second
        "amx": ("-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    },
}
_USED = ("avxvnni", "bf16", "vnni")  # of AMX, accepted as well, no kernel makes use yet
# What the command line calls the elements of a cache -> their dtype on GPUs, which have no instructions for the e3m4 of
# the CPU's fp8 cache.
KV_FLAGS: Mapping[str, str] = {"bf16": "bf16", "f32": "f32", "int8": "i8", "fp8": "f8e4m3"}


@dataclass(frozen=True)
class Target:
    """A machine to build for: kind, arch and features (extras, sorted).

    A `cpu` has an ISA level for its arch. A `cuda` has an SM (`sm_90a`), and `sku` where a GPU was named: then there
    are a memory to plan for and rates to estimate with.
    """

    kind: str
    arch: str
    features: tuple[str, ...] = ()
    sku: str | None = None

    def __str__(self) -> str:
        return f"{self.kind}:" + "+".join((self.sku or self.arch, *self.features))

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags that make the C++ compiler use this ISA and nothing beyond it."""
        return (*_LEVELS[self.arch], *(flag for f in self.features for flag in _EXTRAS[self.arch][f]))

    @property
    def sm(self) -> SM:
        """What kernels may use of the GPU. KeyError for a CPU."""
        return _BY_NAME[self.arch]

    @property
    def gpu(self) -> SKU | None:
        """The GPU that was named, if one was."""
        return skus()[self.sku] if self.sku else None


_BY_NAME: Mapping[str, SM] = {sm.name: sm for sm in SMS.values()}


def parse(text: str) -> Target:
    """The target that `text` names; `cpu` alone is the best level of this machine. UsageError lists what is known."""
    kind, _, rest = text.partition(":")
    if kind == "cpu":
        return _cpu(text, rest)
    name = rest if kind == "cuda" else text
    if name in skus():
        return Target("cuda", skus()[name].sm.name, sku=name)
    if name in _BY_NAME:
        return Target("cuda", name)
    if text == "cuda":
        raise UsageError(f"the target cuda needs a GPU, since none is asked here; known: {', '.join(known())}")
    raise UsageError(f"unknown target {text!r}{_suggestion(name)}; known: {', '.join(known())}")


def _cpu(text: str, isa: str) -> Target:
    if not isa:
        return host()
    arch, *features = isa.split("+")
    bases = {extra: level for level, extras in _EXTRAS.items() for extra in extras}
    unknown = [arch] if arch not in _LEVELS else [f for f in features if f not in bases]
    if unknown:
        raise UsageError(f"target {text!r} names {unknown[0]!r}, which is not known; known: {', '.join(known())}")
    for extra in features:
        if bases[extra] != arch:
            raise UsageError(f"target {text!r}: +{extra} builds on cpu:{bases[extra]}, not on {arch}")
    return Target("cpu", arch, tuple(sorted(set(features))))


def _suggestion(name: str) -> str:
    """What was probably meant: names that begin as this one does, else those that are spelt alike."""
    names = [*skus(), *_BY_NAME]
    spelt = name.lower().replace("_", "-").replace(" ", "-")
    begin = [n for n in names if spelt and n.replace("_", "-").startswith(spelt)]
    alike = begin or difflib.get_close_matches(name.lower(), names, n=2, cutoff=0.6)
    return f" (did you mean {' or '.join(alike)}?)" if alike else ""


def known() -> tuple[str, ...]:
    """Every form of a target's name."""
    levels = (f"cpu:{level}" + "".join(f"[+{e}]" for e in _EXTRAS[level]) for level in _LEVELS)
    return ("cpu", *levels, *skus(), *_BY_NAME)


def check_dtypes(target: Target, dtypes: Iterable[str], kv_cache_dtype: str) -> None:
    """UsageError when the target has no instructions for what weights are stored as (dtypes or schemes), or for the
    cache, by its name on the command line; it names the nearest pairs that are possible.
    """
    if target.kind != "cuda":
        return
    for name in dtypes:
        if cpu_alone(name):
            raise UsageError(
                f"--dtype {name} multiplies codes of 4 bits by codes of 8, which has kernels for CPUs alone; {target} "
                f"has them for 4 bits with activations as they are: take --dtype {name.replace('int4', 'awq')}"
            )
        if needs_fp8(name) and not target.sm.fp8:
            near = ", ".join(n for n, sku in skus().items() if sku.sm.fp8)
            raise UsageError(
                f"--dtype {name} needs a GPU that multiplies fp8 (from sm_89 on); {target} is {target.arch}. Take "
                f"--dtype int8 for it, or one of --target {near}"
            )
    if kv_cache_dtype not in kv_flags(target.sm):
        raise UsageError(
            f"--kv-cache-dtype {kv_cache_dtype} needs a GPU that converts fp8 (from sm_89 on); {target} is "
            f"{target.arch}. Take --kv-cache-dtype int8 (as small) for it"
        )


def kv_flags(sm: SM) -> list[str]:
    """Values of --kv-cache-dtype that an SM takes."""
    return [name for name, dtype in KV_FLAGS.items() if sm.fp8 or dtype != "f8e4m3"]


def needs_fp8(name: str) -> bool:
    """Whether products of what is stored as `name` are products of fp8."""
    return name in SCHEMES and SCHEMES[name].act == "f8e4m3"


def cpu_alone(name: str) -> bool:
    """Whether a scheme has kernels for CPUs alone: that of 4-bit weights by activations with a scale a group."""
    return name in SCHEMES and SCHEMES[name].by_group


def host() -> Target:
    """The best level that this machine runs, by the feature flags of its CPU, and the extras that kernels use."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return Target("cpu", "portable")
    have = cpu_flags()
    level = next((a for a in ("x86-64-v4", "x86-64-v3") if have.issuperset(CPU_FLAGS[a])), "portable")
    extras = (e for e in _EXTRAS[level] if e in _USED and have.issuperset(CPU_FLAGS[e]))
    return Target("cpu", level, tuple(sorted(extras)))
