"""How weights are to be stored: in go --dtype, --quant-config and the checkpoint, out comes a QuantConfig."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from planc.codegen.cuda.call import Bucket, calls
from planc.codegen.kernel import layouts
from planc.codegen.target import Target
from planc.compiler.ir.graph import Node, Value
from planc.compiler.ir.operands import scales_type
from planc.compiler.ir.quant import SCHEMES, Scheme
from planc.compiler.ir.types import PAIRS, TensorType
from planc.compiler.source import ModelSource
from planc.errors import PlancError, UsageError
from planc.passes.schemes import PLAIN, QuantConfig

AUTO = "auto"
KINDS = {"lm_head": "head", "embedding": "embedding", "router": "router"}
_EVERY = ("linear", "expert", "head", "embedding", "router")
NAMES = (AUTO, *PLAIN, *(name for name, row in SCHEMES.items() if not row.read_only))


def storage(dtype: str, path: Path | None, source: ModelSource, targets: Iterable[Target] = ()) -> QuantConfig:
    """What to do with each weight of `source`.

    `auto` keeps the schemes of a checkpoint that is quantized, and is bf16 for one that is not. Codes that only files
    hold and not all of the targets multiply are widened. UsageError for names and fields that mean nothing, for
    patterns that no tensor has, and for quantizing a second time what does not say that it may be.
    """
    said = _read(path) if path else {}
    default = _known(said.get("default", AUTO), f"{path}: default") if path else AUTO
    if dtype != AUTO and default not in (AUTO, dtype):
        raise UsageError(f"--dtype {dtype} and the default of {path}, {default}, differ; leave one of them out.")
    chosen = _known(dtype, "--dtype") if dtype != AUTO else default
    modules = tuple((p, _known(name, f"{path}: {p}")) for p, name in said.get("modules", {}).items())
    _check_patterns(modules, path, source)
    kinds = {kind: _known(said[field], f"{path}: {field}") for field, kind in KINDS.items() if field in said}
    native = _kept(source, tuple(targets))
    held = Counter(native.values())
    again = source.requantizes and chosen != AUTO and {*source.native.values()} != {chosen}
    if not held or chosen in PLAIN or again:
        return QuantConfig("bf16" if chosen == AUTO else chosen, modules, kinds)
    if chosen != AUTO and set(held) != {chosen}:
        raise UsageError(
            f"the checkpoint is quantized already, as {', '.join(sorted(held))}: --dtype auto keeps it so, --dtype "
            f"bf16 widens it. For {chosen}, start from the unquantized model."
        )
    # What the checkpoint left wide stays so.
    return QuantConfig(
        held.most_common(1)[0][0], modules, dict.fromkeys(_EVERY, "bf16") | kinds, native, frozenset(kinds)
    )


def _kept(source: ModelSource, targets: tuple[Target, ...]) -> Mapping[str, str]:
    """The tensors that stay in the scheme that the checkpoint holds them in."""
    if not source.requantizes:
        return source.native
    missing = {n for n in set(source.native.values()) for t in targets if not _has_kernels(SCHEMES[n], t)}
    return {tensor: name for tensor, name in source.native.items() if name not in missing}


def used(config: QuantConfig) -> list[str]:
    """Every scheme that the build may come to store a weight in."""
    return sorted(n for n in config.said | {*config.native.values()} if n in SCHEMES)


def check_kernels(config: QuantConfig, target: Target) -> None:
    """PlancError lists the schemes that the target has no kernels for."""
    missing = [name for name in used(config) if not _has_kernels(SCHEMES[name], target)]
    if missing:
        raise PlancError(
            f"the target {target} has no kernels for {', '.join(missing)}; it has them for "
            f"{', '.join(n for n, row in SCHEMES.items() if _has_kernels(row, target))}, bf16 and f32."
        )


def _has_kernels(row: Scheme, target: Target) -> bool:
    """Asks the kernel table with a small product."""
    w = TensorType("f32", (64, 128))
    rows = TensorType(row.act or "f32", ("T", 128))
    x = [rows, *([scales_type(rows, row.rows_group)] if row.act else [])]
    types = [*x, *(_stored(row.part_type(w, p), target) for p in row.parts)]
    out = Value("y", TensorType("f32", ("T", 64)))
    node = Node("qlinear", tuple(f"i{i}" for i in range(len(types))), (out,), (("scheme", row.name),))
    try:
        if target.kind == "cuda":
            calls(node, dict(zip(node.inputs, types, strict=True)), target.sm.number, Bucket(1, 1, 1))
        else:
            layouts(node, types, target)
    except PlancError:
        return False
    return True


def _stored(t: TensorType, target: Target) -> TensorType:
    return replace(t, layout=PAIRS) if target.kind == "cuda" and t.dtype == "u4" else t


def _known(name: Any, where: str) -> str:
    if name not in NAMES:
        raise UsageError(f"{where}: {name!r} is no storage of weights; there are {', '.join(NAMES)}.")
    return str(name)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UsageError(f"--quant-config {path}: {e.strerror}.") from e
    except ValueError as e:
        raise UsageError(f"--quant-config {path} is not JSON: {e}.") from e
    if not isinstance(said, dict):
        raise UsageError(f"--quant-config {path} must be a JSON object.")
    fields = ("default", "modules", *KINDS)
    if unknown := sorted(set(said) - set(fields)):
        raise UsageError(f"--quant-config {path}: unknown field {unknown[0]!r}; there are {', '.join(fields)}.")
    if not isinstance(said.get("modules", {}), dict):
        raise UsageError(f"--quant-config {path}: modules must map patterns to schemes.")
    return said


def _check_patterns(modules: tuple[tuple[str, str], ...], path: Path | None, source: ModelSource) -> None:
    for pattern, _ in modules:
        try:
            compiled = re.compile(pattern)
        except re.error as e:
            raise UsageError(f"--quant-config {path}: {pattern!r} is no regular expression: {e}.") from e
        if not any(compiled.search(name) for name in source.tensors):
            raise UsageError(
                f"--quant-config {path}: no tensor of the checkpoint matches {pattern!r}; one of its tensors is "
                f"{min(source.tensors, key=len)}."
            )
