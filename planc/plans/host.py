"""What this machine offers: in goes nothing, out come CPU features, CPUs and memory still to take, the cache folder."""

import math
import os
import platform
from functools import lru_cache
from pathlib import Path

# ISA level or extra -> the flags of /proc/cpuinfo that it needs (x86-64 psABI levels; AMX and AVX-512 extensions).
_V3 = ("avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
CPU_FLAGS: dict[str, tuple[str, ...]] = {
    "portable": (),
    "x86-64-v3": _V3,
    "x86-64-v4": _V4,
    "avxvnni": ("avx_vnni",),
    "vnni": ("avx512_vnni",),
    "bf16": ("avx512_bf16", "avx512_vnni"),
    "amx": ("amx_tile", "amx_bf16", "amx_int8"),
}

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
CPU_TOPOLOGY = Path("/sys/devices/system/cpu")


@lru_cache(maxsize=1)
def cpu_flags() -> frozenset[str]:
    """Feature flags of this CPU as Linux spells them; empty where /proc/cpuinfo does not tell."""
    return frozenset(_told("flags", "Features").split())


def cpu_name() -> str:
    """What this CPU is called, empty where /proc/cpuinfo does not tell."""
    return _told("model name")


def _told(*names: str) -> str:
    """What /proc/cpuinfo says first under one of the names, or nothing."""
    try:
        rows = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((row.partition(":")[2].strip() for row in rows if row.startswith(names)), "")


def isa_parts(target: str) -> list[str]:
    """`cpu:x86-64-v4+vnni` -> [`x86-64-v4`, `vnni`]."""
    return target.partition(":")[2].split("+")


def missing_flags(target: str) -> list[str]:
    """CPU flags that a target such as `cpu:x86-64-v4+vnni` needs and this machine lacks; empty when it runs here."""
    parts = isa_parts(target)
    if parts[0] != "portable" and platform.machine() not in ("x86_64", "AMD64"):
        return ["x86-64"]
    return [flag for part in parts for flag in CPU_FLAGS.get(part, (part,)) if flag not in cpu_flags()]


def available_bytes() -> int:
    """Bytes that this process may still allocate: the kernel's estimate, or what its cgroup leaves when less."""
    return min(_meminfo(), _cgroup_left())


def usable_cpus() -> int:
    """CPUs that this process may use, at least 1: its affinity, and no more than its cgroup's quota."""
    return _within_quota(len(_allowed()))


def usable_cores() -> int:
    """Physical cores among those CPUs: kernels that keep a core busy gain nothing from a second thread on it."""
    return _within_quota(len({_siblings(cpu) for cpu in _allowed()}))


def _allowed() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _siblings(cpu: int) -> str:
    """The CPUs that share a core with this one; itself where the system does not tell."""
    try:
        return (CPU_TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _within_quota(cpus: int) -> int:
    try:
        quota, period = CPU_QUOTA.read_text().split()
        return max(1, min(cpus, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroup, or no quota ("max")
        return cpus


def cache_dir() -> Path:
    """$PLANC_CACHE_DIR, else $XDG_CACHE_HOME/planc, else ~/.cache/planc. Not created."""
    if own := os.environ.get("PLANC_CACHE_DIR"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "planc"


def _meminfo() -> int:
    try:
        rows = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kib = next(int(r.split()[1]) for r in rows if r.startswith("MemAvailable:"))
    return kib * 1024


def _cgroup_left() -> int:
    base = Path("/sys/fs/cgroup")
    try:
        limit = (base / "memory.max").read_text().strip()
        if limit == "max":
            return 1 << 62
        used = int((base / "memory.current").read_text())
        stat = dict(row.split() for row in (base / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 1 << 62
    # the page cache that the kernel would drop first counts as used there, and is ours to take
    return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
