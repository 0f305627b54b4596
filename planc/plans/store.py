"""Plan directories: in goes a plan and the files beside it, out comes a directory that is whole or absent."""

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from planc.errors import PlancError, UsageError
from planc.plans.codec import decode, dumps, to_json
from planc.plans.schema import SCHEMA_VERSION, Plan

MANIFEST = "plan.json"
GRAPH = "graph.ir"
LOG = "build.json"  # how the build went: the one file that differs between two builds, and no part of the plan


def sha256(path: Path) -> str:
    """Hex digest of a file, read in pieces."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def load(path: str | Path) -> Plan:
    """The plan of a directory; PlancError when it is missing, malformed or of another schema version.

    Reads plan.json only. Hashes are `check`'s work, so that serving starts at once.
    """
    manifest = Path(path) / MANIFEST
    try:
        data = json.loads(manifest.read_text())
    except FileNotFoundError:
        raise PlancError(f"{path} is no plan: it has no {MANIFEST}. Build one with `planc build`.") from None
    except NotADirectoryError:
        raise PlancError(f"{path} is a file; a plan is a directory with a {MANIFEST}.") from None
    except (ValueError, RecursionError) as e:
        raise PlancError(f"{manifest} is not valid JSON ({e}). Rebuild the plan.") from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise PlancError(
            f"{manifest} has schema version {version}, this planc reads {SCHEMA_VERSION}. Rebuild the plan."
        )
    try:
        plan = decode(Plan, data)
    except ValueError as e:
        raise PlancError(f"{manifest}: {e}. Rebuild the plan.") from None
    if plan.digest != _digest(data):
        raise PlancError(f"{manifest} has changed since the build. Rebuild the plan.")
    return plan


def _digest(data: dict[str, Any]) -> str:
    """Of what is written, not of what is read: a plan from before a field was added stays as it was sealed."""
    return hashlib.sha256(dumps(data | {"digest": ""}).encode()).hexdigest()


def listing(root: Path) -> dict[str, str]:
    """sha256 of every file below `root` but the manifest and the log, by relative path, sorted."""
    return {name: sha256(root / name) for name in members(root)}


def members(root: Path) -> list[str]:
    """Relative paths of the files below `root` that a manifest lists: all but itself and the log, sorted."""
    files = sorted(p for p in root.rglob("*") if p.is_file() and p not in (root / MANIFEST, root / LOG))
    return [p.relative_to(root).as_posix() for p in files]


def seal(root: Path, plan: Plan) -> Plan:
    """Hashes the files that lie in `root`, writes plan.json, returns the plan with its file table."""
    sealed = replace(plan, files=listing(root))
    sealed = replace(sealed, digest=_digest(asdict(sealed)))
    (root / MANIFEST).write_text(to_json(sealed))
    return sealed


def write_log(root: Path, seconds: Mapping[str, float], peak_rss: int) -> None:
    """Writes build.json: seconds of each stage, the build's peak memory in bytes."""
    rounded = {name: round(s, 2) for name, s in seconds.items()}
    (root / LOG).write_text(json.dumps({"seconds": rounded, "peak_rss_bytes": peak_rss}, indent=1) + "\n")


@contextmanager
def publish(out: Path, *, force: bool) -> Iterator[Path]:
    """A scratch directory beside `out` that becomes `out` when the block succeeds, and vanishes when it fails.

    Raises UsageError when `out` exists and `force` is off or it is not a plan, PlancError when the disk is full.
    """
    out = out.resolve()
    check_free(out, force=force)
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".building", dir=out.parent))
    try:
        yield scratch
        scratch.chmod(0o755)
        _swap(scratch, out)
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise PlancError(f"no space left on the disk of {out.parent}; free some and build again.") from e
        raise PlancError(f"writing {out} failed: {e.strerror or e}; nothing was left behind.") from e
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def check_free(out: Path, *, force: bool) -> None:
    """Raises UsageError when `out` cannot be written: it exists without --force, or is something else than a plan."""
    if not out.exists():
        return
    if not force:
        raise UsageError(f"{out} exists; pass --force to replace it, or choose another -o.")
    if not (out / MANIFEST).is_file() and (out.is_file() or any(out.iterdir())):
        raise UsageError(f"{out} is not a plan, so --force will not delete it; choose another -o.")


def _swap(scratch: Path, out: Path) -> None:
    old = out.with_name(f".{out.name}.{os.getpid()}.old")
    replaces = out.exists()
    if replaces:
        os.rename(out, old)
    try:
        os.rename(scratch, out)
    except OSError:
        if replaces:
            os.rename(old, out)
        raise
    shutil.rmtree(old, ignore_errors=True)
