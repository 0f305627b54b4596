"""How products are cut, as data: in go measured entries, out comes tuning.json, and back, every field checked.

A cut is a matter of speed alone. On GPUs it is a tile for each number of rows: `bk`, which orders the additions of an
output, follows from the weight. On CPUs it is a blocking for all numbers of rows.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from planc.errors import PlancError, UsageError
from planc.plans.codec import decode

VERSION = 1


@dataclass(frozen=True)
class Tile:
    """BM rows by BN channels in steps of BK, by `warps` warps, with `stages` steps in flight."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.bm} x {self.bn} x {self.bk}, {self.warps} warps, {self.stages} stages"


@dataclass(frozen=True)
class Product:
    """What a tile is chosen for: `rows` rows of dtype `x` by a weight [n, k] of a dtype or scheme, in nodes of `op`.

    Of `experts` (0: none) each has such a weight, and the rows are shared among them. `ragged` rows or weights do not
    allow accesses of 16 bytes.
    """

    op: str
    x: str
    weight: str
    n: int
    k: int
    rows: int
    experts: int = 0
    ragged: bool = False

    def __str__(self) -> str:
        of = f" of {self.experts} experts" if self.experts else ""
        rows = f"{self.rows} row{'s' if self.rows > 1 else ''}"
        return f"{self.op} of {rows} of {self.x} by {self.weight} [{self.n}, {self.k}]{of}"


@dataclass(frozen=True)
class Entry:
    """A product's fastest tile on `target`, a GPU of `planc targets` or an SM, as `gpu` was seen to run it."""

    target: str
    product: Product
    tile: Tile
    microseconds: float
    gpu: str = ""

    def __str__(self) -> str:
        return f"{self.product} on {self.target} in tiles of {self.tile}"


@dataclass(frozen=True)
class Blocking:
    """What a CPU's kernel of a product may choose; None leaves it to the kernel: rows of a chunk, rows from which on
    weights are unpacked in panels, most k of a panel, rows of a register tile.
    """

    chunk_rows: int | None = None
    panel_from: int | None = None
    panel_k: int | None = None
    tile_rows: int | None = None

    @property
    def given(self) -> dict[str, int]:
        """The choices that are made."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.given.items()) or "the defaults"


@dataclass(frozen=True)
class CpuProduct:
    """What a blocking is chosen for: rows by a weight [n, k] of a dtype or scheme, in nodes of `op`; of `experts` (0:
    none) each has such a weight.
    """

    op: str
    weight: str
    n: int
    k: int
    experts: int = 0

    def __str__(self) -> str:
        of = f" of {self.experts} experts" if self.experts else ""
        return f"{self.op} by {self.weight} [{self.n}, {self.k}]{of}"


@dataclass(frozen=True)
class CpuEntry:
    """A product's fastest blocking on `target`, as `cpu` was seen to run it on so many threads, and its mean time over
    that of the defaults.
    """

    target: str
    product: CpuProduct
    blocking: Blocking
    ratio: float
    threads: int = 1
    cpu: str = ""

    def __str__(self) -> str:
        return f"{self.product} on {self.target} with {self.blocking}"


@dataclass(frozen=True)
class Tuning:
    """A whole tuning.json, tiles of GPUs and blockings of CPUs, and the sha256 of its bytes."""

    entries: tuple[Entry, ...] = ()
    cpu_entries: tuple[CpuEntry, ...] = ()
    sha256: str = ""

    def of(self, target: str) -> dict[Product, Tile]:
        """The tiles of a GPU or SM."""
        return {e.product: e.tile for e in self.entries if e.target == target}

    def blockings(self, target: str) -> Mapping[CpuProduct, Blocking]:
        """The blockings of a CPU's target."""
        return {e.product: e.blocking for e in self.cpu_entries if e.target == target}

    @property
    def targets(self) -> list[str]:
        """Every target that has an entry."""
        return sorted({e.target for e in self.entries} | {e.target for e in self.cpu_entries})


@dataclass(frozen=True)
class _File:
    version: int
    entries: tuple[Entry, ...]
    cpu_entries: tuple[CpuEntry, ...] = ()


def load(path: Path) -> Tuning:
    """The entries of a file. UsageError when it cannot be read, is none, or says two things of one product."""
    try:
        data = path.read_bytes()
        file = decode(_File, json.loads(data), "tuning")
    except OSError as e:
        raise UsageError(f"{path}: {e.strerror}; planc tune writes such a file.") from None
    except (ValueError, RecursionError) as e:
        raise UsageError(f"{path} is no tuning file: {e}; planc tune writes one.") from None
    if file.version != VERSION:
        raise UsageError(f"{path} has version {file.version}, this planc reads {VERSION}; measure with planc tune.")
    seen: set[tuple[str, Product | CpuProduct]] = set()
    every: list[Entry | CpuEntry] = [*file.entries, *file.cpu_entries]
    for entry in every:
        if (entry.target, entry.product) in seen:
            raise UsageError(f"{path} has two entries for {entry.product} on {entry.target}; leave one.")
        seen.add((entry.target, entry.product))
    return Tuning(file.entries, file.cpu_entries, hashlib.sha256(data).hexdigest())


def save(path: Path, entries: Iterable[Entry], cpu_entries: Iterable[CpuEntry] = ()) -> None:
    """Writes a file, an entry a line, whole or not at all. PlancError says why it cannot."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(
            f'{{"version": {VERSION}, "entries": {_lines(entries)}, "cpu_entries": {_lines(cpu_entries)}}}\n'
        )
        os.replace(partial, path)
    except OSError as e:
        partial.unlink(missing_ok=True)
        raise PlancError(f"{path} cannot be written ({e.strerror}); choose another -o.") from None


def _lines(entries: Iterable[Entry | CpuEntry]) -> str:
    rows = [json.dumps(asdict(e), ensure_ascii=False, allow_nan=False) for e in entries]
    return "[\n  " + ",\n  ".join(rows) + "\n]" if rows else "[]"
