"""compressed-tensors' config becomes groups: which modules are targeted, and how their weights are quantized."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planc.compiler.source.quantized.layout import check_fields
from planc.errors import PlancError

_METHOD = "compressed-tensors"
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")

_FIELDS: dict[str, Any] = {
    "quant_method": None,
    "format": (*_FORMATS, "mixed-precision"),
    "quantization_status": ("compressed",),
    "sparsity_config": ({}, {"format": "dense"}),
    "transform_config": ({},),
    **dict.fromkeys(("config_groups", "ignore", "kv_cache_scheme", "global_compression_ratio", "version")),
}
_GROUP: dict[str, Any] = {
    "format": _FORMATS,
    **dict.fromkeys(("targets", "weights", "input_activations")),
}
# How scales were found, and what they were stored as, changes nothing in what they mean.
_WEIGHTS: dict[str, Any] = {
    "num_bits": (4, 8),
    "type": ("int", "float"),
    "symmetric": (True, False),
    "strategy": ("tensor", "channel", "group", "block"),
    "dynamic": (False,),
    "actorder": ("weight", "static", "group", "dynamic", False),
    **dict.fromkeys(("group_size", "block_structure", "observer", "observer_kwargs", "scale_dtype", "zp_dtype")),
}
_ACTIVATIONS: dict[str, Any] = {
    **{name: None for name in _WEIGHTS},
    "num_bits": (8,),
    "type": ("int", "float"),
}


@dataclass(frozen=True)
class Group:
    """`kind` int or float, `strategy` what shares a scale, `size` of a group (-1: a channel), `block` its rows and
    columns; `packed` where codes lie in words; `activations` the kind that they were quantized to, if any.
    """

    targets: tuple[str, ...]
    kind: str
    bits: int
    symmetric: bool
    strategy: str
    size: int
    block: tuple[int, int] | None
    packed: bool
    activations: str | None

    def named(self, module: str) -> bool:
        """Whether a target names the module, spelt out or by a pattern."""
        return any(_matches(module, target) for target in self.targets)

    @property
    def classes(self) -> bool:
        """Whether a target is a class of modules: one with quantized tensors can only be a Linear."""
        return "Linear" in self.targets


@dataclass(frozen=True)
class Config:
    """The groups in order."""

    path: Path
    groups: tuple[Group, ...]
    kv_cache: bool

    def group(self, module: str) -> Group:
        """The first group that names a module, else the first that targets its class."""
        named = [g for g in self.groups if g.named(module)] or [g for g in self.groups if g.classes]
        if not named:
            raise PlancError(
                f"{self.path}: module {module} has a weight_scale, and no group of the quantization_config targets it. "
                "Check that config.json and the weights belong together."
            )
        return named[0]


def parsed(path: Path, stated: dict[str, Any]) -> Config:
    """PlancError for a field or a value that is not known, by name."""
    check_fields(path, _METHOD, stated, _FIELDS)
    groups = stated.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise PlancError(
            f"{path}: the quantization_config ({_METHOD}) has no config_groups, which say what is quantized."
        )
    made = tuple(_group(path, f"{_METHOD}, {name}", group, stated.get("format")) for name, group in groups.items())
    return Config(path, made, bool(stated.get("kv_cache_scheme")))


def _group(path: Path, where: str, group: Any, form: str | None) -> Group:
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise PlancError(f"{path}: the quantization_config ({where}) does not say how weights are quantized.")
    check_fields(path, where, group, _GROUP)
    weights, inputs = group["weights"], group.get("input_activations")
    check_fields(path, f"{where}, weights", weights, _WEIGHTS)
    if inputs is not None:
        check_fields(path, f"{where}, input_activations", inputs, _ACTIVATIONS)
    made = Group(
        targets=tuple(group.get("targets") or ()),
        kind=str(weights.get("type", "int")),
        bits=int(weights.get("num_bits", 8)),
        symmetric=weights.get("symmetric", True) is not False,
        strategy=_strategy(weights),
        size=weights.get("group_size") or -1,
        block=_block(path, where, weights),
        packed=(group.get("format") or form) == "pack-quantized",
        activations=None if inputs is None else str(inputs.get("type", "int")),
    )
    _check(path, where, made)
    return made


def _strategy(weights: Mapping[str, Any]) -> str:
    """What compressed-tensors infers where nothing is stated."""
    size = weights.get("group_size")
    return weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")


def _block(path: Path, where: str, weights: Mapping[str, Any]) -> tuple[int, int] | None:
    if weights.get("strategy") != "block":
        return None
    stated = weights.get("block_structure")
    sizes = stated.split("x") if isinstance(stated, str) else stated
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(str(size).isdecimal() and int(size) for size in sizes):
        raise PlancError(
            f"{path}: the quantization_config ({where}) has block_structure = {stated!r}; expected two numbers."
        )
    return int(sizes[0]), int(sizes[1])


def _check(path: Path, where: str, group: Group) -> None:
    """PlancError for what is spelt rightly, and is no layout."""
    odd = None
    if group.kind == "float" and (group.bits != 8 or group.packed or not group.symmetric):
        odd = f"{group.bits}-bit floats" + ("" if group.symmetric else " with zero points")
    elif group.kind == "int" and group.block is not None:
        odd = "integers in blocks"
    elif group.kind == "int" and group.bits == 4 and not group.packed:
        odd = "4-bit integers that are not packed"
    if odd is not None:
        raise PlancError(
            f"{path}: the quantization_config ({where}) has {odd}, which planc does not read. "
            "Use the unquantized model."
        )


def _matches(module: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return module == target
