"""A tiny model's folder becomes a quantized checkpoint in one of the layouts, packed word by word as it is documented.

Nothing here is shared with the reader: codes are drawn at random, every word is put together by shifts in a loop, and
`Weight.floats` says what the checkpoint means.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

Array = np.ndarray[Any, Any]
LINEAR = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down"))


@dataclass
class Weight:
    """Codes [N, K] with a scale and a zero point for each group of columns, and the group of each column."""

    codes: Array
    scales: Array  # [G, N]
    zeros: Array  # [G, N]
    order: Array  # [K]

    @property
    def floats(self) -> Array:
        """f32[N, K]."""
        zeros, scales = self.zeros.T[:, self.order], self.scales.T[:, self.order]
        return (self.codes.astype(np.float32) - zeros.astype(np.float32)) * scales.astype(np.float32)


def random_weight(
    n: int, k: int, bits: int, group: int, rng: np.random.Generator, *, zero: int | None = None, shuffled: bool = False
) -> Weight:
    """Codes over all of their range; `zero` is every zero point, else they are drawn too."""
    groups = k // group
    zeros = rng.integers(1, 1 << bits, (groups, n)) if zero is None else np.full((groups, n), zero)
    order = np.arange(k) // group
    scales = (rng.uniform(0.5, 1.5, (groups, n)) * 0.2 / (1 << (bits - 1))).astype(np.float16)
    return Weight(rng.integers(0, 1 << bits, (n, k)), scales, zeros, rng.permutation(order) if shuffled else order)


def words(fields: list[Array], bits: int) -> Array:
    """i32 words of equally shaped fields, the first lowest."""
    made = np.zeros(fields[0].shape, np.uint32)
    for i, field in enumerate(fields):
        made |= (field.astype(np.uint32) & ((1 << bits) - 1)) << np.uint32(bits * i)
    return made.view(np.int32)


def along(codes: Array, axis: int, bits: int) -> Array:
    """Neighbours along an axis share a word."""
    a_word = 32 // bits
    return words([codes.take(range(i, codes.shape[axis], a_word), axis) for i in range(a_word)], bits)


def awq(weight: Weight) -> dict[str, Array]:
    """AutoAWQ, version gemm: eight neighbours in N a word, the even ones in its low half."""

    def packed(table: Array) -> Array:
        return words([table[:, i::8] for i in (0, 2, 4, 6, 1, 3, 5, 7)], 4)

    return {"qweight": packed(weight.codes.T), "qzeros": packed(weight.zeros), "scales": weight.scales}


def gptq(weight: Weight, bits: int, *, v2: bool = False) -> dict[str, Array]:
    """GPTQ: neighbours in K share a word, zero points are stored one less unless in v2."""
    stored = weight.zeros if v2 else weight.zeros - 1
    return {
        "qweight": along(weight.codes.T, 0, bits),
        "qzeros": along(stored, 1, bits),
        "scales": weight.scales,
        "g_idx": weight.order.astype(np.int32),
    }


def restate(folder: Path, config: dict[str, Any]) -> None:
    """Sets config.json's quantization_config."""
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stated | {"quantization_config": config}))


def replace(folder: Path, change: Callable[[dict[str, Array]], dict[str, Array]]) -> None:
    """Rewrites the tensors of a folder of one file."""
    tensors = {name: np.ascontiguousarray(t) for name, t in change(load_file(folder / "model.safetensors")).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def write(
    folder: Path,
    config: dict[str, Any],
    draw: Callable[[int, int], Weight],
    pack: Callable[[Weight], dict[str, Array]],
    endings: tuple[str, ...] = LINEAR,
) -> dict[str, Weight]:
    """Puts drawn weights in the place of a folder's linear ones; returns them by their plain names."""
    drawn: dict[str, Weight] = {}

    def change(tensors: dict[str, Array]) -> dict[str, Array]:
        made = {}
        for name, tensor in tensors.items():
            if name.endswith(endings):
                drawn[name] = draw(*tensor.shape)
                module = name.removesuffix(".weight")
                made |= {f"{module}.{part}": packed for part, packed in pack(drawn[name]).items()}
            else:
                made[name] = tensor
        return made

    replace(folder, change)
    restate(folder, config)
    return drawn
