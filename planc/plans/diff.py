"""Compares two plans: in go two directories, out come lines that say what differs, none when they are identical."""

import dataclasses
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planc.plans.store import GRAPH, MANIFEST, listing, load

_GRAPH_LINES = 40  # of the graph's diff; the rest is counted


def diff(a: Path, b: Path) -> list[str]:
    """Differences of the manifests field by field, of the files by their hash now, and of the graphs as text.

    Raises PlancError when one of them is no plan.
    """
    left, right = dataclasses.asdict(load(a)), dataclasses.asdict(load(b))
    for table in (left, right):  # the files are compared as they are now, and both digests follow from the rest
        del table["files"], table["digest"]
    out = list(_fields(left, right, ""))
    files_a, files_b = listing(a), listing(b)
    out += [f"only in {a}: {n}" for n in files_a if n not in files_b]
    out += [f"only in {b}: {n}" for n in files_b if n not in files_a]
    out += [f"differs: {n}" for n in files_a if n in files_b and files_a[n] != files_b[n]]
    if files_a.get(GRAPH) != files_b.get(GRAPH):
        out += _graphs(a / GRAPH, b / GRAPH)
    if not out and (a / MANIFEST).read_bytes() != (b / MANIFEST).read_bytes():
        out.append(f"differs: {MANIFEST} (file table or spelling)")
    return out


def _fields(a: Any, b: Any, where: str) -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted({*a, *b}):
            yield from _fields(a.get(key), b.get(key), f"{where}.{key}" if where else key)
    elif isinstance(a, tuple | list) and isinstance(b, tuple | list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _fields(x, y, f"{where}[{i}]")
    elif a != b:
        yield f"{where}: {_short(a)} -> {_short(b)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _graphs(a: Path, b: Path) -> list[str]:
    if not a.is_file() or not b.is_file():
        return []
    lines = list(difflib.unified_diff(a.read_text().splitlines(), b.read_text().splitlines(), lineterm="", n=0))
    rest = len(lines) - _GRAPH_LINES
    return lines[:_GRAPH_LINES] + ([f"... {rest} more lines of {GRAPH} differ"] if rest > 0 else [])
