"""Kernels under test: in go ops with types and arrays, out come results, with guards around every buffer.

All kernels of a test module become one library: each source in a namespace of its own, a few sources a file, so that
the headers are read a few times only.
"""

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import ml_dtypes
import numpy as np

from planc.codegen.cpu import build_library
from planc.codegen.kernel import Constant, Kernel, arguments, choose
from planc.codegen.render import kernel_source
from planc.codegen.target import Target, parse
from planc.compiler.ir import rounded
from planc.compiler.ir.graph import Node, Value
from planc.compiler.ir.ops import OPS
from planc.compiler.ir.packing import pack
from planc.compiler.ir.types import DTYPES, PACKED, Attr, TensorType
from planc.plans.host import missing_flags

GUARD = 256
PATTERN = 0xFF  # every float of a guard is a NaN: reading one shows in the result
TARGETS = [
    t for t in ("cpu:portable", "cpu:x86-64-v3", "cpu:x86-64-v4", "cpu:x86-64-v4+bf16+vnni") if not missing_flags(t)
]
_BYTE_DOTS = {"avxvnni", "vnni"}
_KERNELS_A_FILE = 6
_COUNTERS, _SCRATCH_BYTES = 1024, 1 << 20  # of scratch.h


def tensor(dtype: str, *shape: int | str, layout: str = "row") -> TensorType:
    return TensorType(dtype, shape, layout)


def f32(*shape: int | str, layout: str = "row") -> TensorType:
    return tensor("f32", *shape, layout=layout)


def i32(*shape: int | str) -> TensorType:
    return tensor("i32", *shape)


class _Sizes(ctypes.Structure):
    """planc_sizes of the kernels' ABI."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("tokens", "seqs", "rows", "table_stride")),
        ("scratch", ctypes.c_void_p),
        ("scratch_bytes", ctypes.c_int64),
    )


@dataclass(frozen=True)
class Case:
    """One op with the types of its inputs, and what was tuned of its kernel."""

    op: str
    types: tuple[TensorType, ...]
    attrs: tuple[tuple[str, Attr], ...] = ()
    tuned: tuple[Constant, ...] = ()

    @cached_property
    def node(self) -> Node:
        outs = OPS[self.op].infer(dict(self.attrs), self.types)
        values = tuple(Value(f"out{i}", t) for i, t in enumerate(outs))
        return Node(self.op, tuple(f"in{i}" for i in range(len(self.types))), values, self.attrs)

    def kernel(self, target: Target) -> Kernel:
        return choose(self.node, self.types, target, self.tuned)

    def __str__(self) -> str:
        attrs = ",".join(f"{k}={v}" for k, v in self.attrs)
        return f"{self.op}({', '.join(map(str, self.types))}{', ' + attrs if attrs else ''})"


def case(op: str, *types: TensorType, **attrs: Attr) -> Case:
    return Case(op, types, tuple(attrs.items()))


def apart(c: Case) -> tuple[Case, Case]:
    """The two ops that one which rounds what it makes stands for."""
    first, second = rounded.pair(c.node, c.types)
    count = len(first.inputs)
    return (
        Case(first.op, c.types[:count], first.attrs),
        Case(second.op, (first.out.type, *c.types[count:]), second.attrs),
    )


class Buffer:
    """Bytes between two guards, aligned to 64."""

    def __init__(self, nbytes: int) -> None:
        raw = np.full(nbytes + 2 * GUARD + 64, PATTERN, np.uint8)
        start = (-raw.ctypes.data) % 64 + GUARD
        self.before, self.data, self.after = (
            raw[start - GUARD : start],
            raw[start : start + nbytes],
            raw[start + nbytes :],
        )
        self._raw = raw

    def check(self, what: str) -> None:
        assert (self.before == PATTERN).all(), f"{what}: bytes before the buffer changed"
        assert (self.after == PATTERN).all(), f"{what}: bytes after the buffer changed"


class Tensor:
    """A buffer that holds an array in the layout of its type; gaps between strided rows hold the guard's pattern."""

    def __init__(self, t: TensorType, shape: Sequence[int]) -> None:
        self.type, self.shape = t, tuple(shape)
        strides = t.strides() if t.layout != "row" else [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if np.prod(shape) else 0
        self.buffer = Buffer(extent * t.itemsize)
        flat = self.buffer.data.view(DTYPES[t.dtype])
        self.array = np.lib.stride_tricks.as_strided(flat, self.shape, [s * t.itemsize for s in strides])

    @classmethod
    def of(cls, t: TensorType, array: np.ndarray) -> "Tensor":
        if t.layout in PACKED:
            array = pack(np.asarray(array, DTYPES[t.dtype]), t.layout)
            t = TensorType(t.dtype, array.shape)
        made = cls(t, array.shape)
        made.array[...] = array
        return made


class Library:
    """The kernels of some cases, compiled for a target, maybe with a macro that the headers know."""

    def __init__(self, cases: Sequence[Case], target: str, folder: Path, macro: str = "") -> None:
        self.target = parse(target)
        kernels = list({k.name: k for k in (c.kernel(self.target) for c in cases)}.values())
        parts = [kernels[i : i + _KERNELS_A_FILE] for i in range(0, len(kernels), _KERNELS_A_FILE)]
        head = f"#define {macro}\n" if macro else ""
        sources = {f"part{i}.cpp": head + joined(part) for i, part in enumerate(parts)}
        self.lib = ctypes.CDLL(str(build_library(sources, self.target, folder)))

    def run(
        self,
        c: Case,
        arrays: Sequence[np.ndarray],
        rows: int,
        *,
        threads: int = 1,
        sizes: tuple[int, int, int, int] = (0, 0, 0, 0),
        inplace: bool = False,
    ) -> tuple[np.ndarray, ...]:
        """Outputs of the case for `rows` rows; asserts that guards and read-only inputs stay as they were.

        An array of dtype u8 (the cache) is passed as it is and may change.
        """
        inputs = [a if t.dtype == "u8" else Tensor.of(t, a) for t, a in zip(c.types, arrays, strict=True)]
        outputs = [Tensor(v.type, (rows, *v.type.shape[1:])) for v in c.node.outputs]
        if inplace:
            outputs[0] = inputs[0]
        before = [None if isinstance(t, np.ndarray) else t.buffer.data.copy() for t in inputs]
        self._call(c, inputs, outputs, rows, threads, sizes)
        for i, (t, old) in enumerate(zip(inputs, before, strict=True)):
            if old is not None:
                t.buffer.check(f"{c} input {i}")
                assert (inplace and i == 0) or (t.buffer.data == old).all(), f"{c}: input {i} changed"
        for i, t in enumerate(outputs):
            t.buffer.check(f"{c} output {i}")
        return tuple(t.array.copy() for t in outputs)

    def multiplied(self, c: Case, x: np.ndarray) -> np.ndarray:
        """The rows of a product as the target multiplies them."""
        weight = next(t for t in c.types[1:] if t.layout in PACKED)
        if weight.dtype in ("i8", "u4") and c.types[0].dtype == "f32" and _BYTE_DOTS & {*self.target.features}:
            scale = np.abs(x).max(-1, keepdims=True) / np.float32(127)
            ratio = np.divide(x, scale, out=np.zeros_like(x), where=scale > 0)
            second = np.rint((ratio - np.rint(ratio)) * np.float32(254))
            return (np.rint(ratio).astype(np.float64) + second / 254) * scale
        if weight.dtype == "bf16" and "bf16" in self.target.features:
            return x.astype(ml_dtypes.bfloat16).astype(np.float32)
        return x

    def _call(self, c, inputs, outputs, rows, threads, sizes) -> None:
        address = {
            f"in{i}": t.ctypes.data if isinstance(t, np.ndarray) else t.buffer.data.ctypes.data
            for i, t in enumerate(inputs)
        }
        address |= {f"out{i}": t.buffer.data.ctypes.data for i, t in enumerate(outputs)}
        pointers = [address[a.value] + a.offset for a in arguments(c.node, c.types, self.target)]
        buffers = (ctypes.c_void_p * len(pointers))(*pointers)
        kernel = getattr(self.lib, c.kernel(self.target).name)
        memory = np.zeros(_SCRATCH_BYTES + 64 if c.op == "paged_attention" else 0, np.uint8)
        scratch = memory[-memory.ctypes.data % 64 :][:_SCRATCH_BYTES]
        given = _Sizes(*sizes, scratch.ctypes.data if len(scratch) else None, len(scratch))
        for thread in range(threads):  # one after the other: a kernel's threads share nothing but the buffers
            kernel(buffers, ctypes.byref(given), rows, thread, threads)
        assert not scratch[: 4 * _COUNTERS].any(), f"{c}: counters of the scratch are not zero again"


def joined(kernels: Sequence[Kernel]) -> str:
    """One source of several kernels."""
    includes: dict[str, None] = {}
    bodies = []
    for i, kernel in enumerate(kernels):
        source = kernel_source(kernel)
        includes |= dict.fromkeys(re.findall(r"^#include .*$", source, re.MULTILINE))
        bodies.append(f"namespace kernel{i} {{\n{re.sub(r'^#include .*$', '', source, flags=re.MULTILINE)}\n}}")
    return "\n".join([*includes, *bodies, ""])


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def assert_close(got: np.ndarray, want: np.ndarray, bound: float, what: object = "") -> None:
    """Each row's largest error, over the largest value of the row, is within the bound."""
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    got64, want64 = (np.asarray(a, np.float64).reshape(len(a), -1) for a in (got, want))
    assert np.isfinite(got64).all(), f"{what}: NaN or infinity in the result"
    error = np.abs(got64 - want64).max(axis=1) / np.maximum(np.abs(want64).max(axis=1), 1e-30)
    assert error.max() <= bound, f"{what}: error {error.max():.3e} in row {error.argmax()}, bound {bound:.1e}"


def assert_same_bits(a: np.ndarray, b: np.ndarray, what: object = "") -> None:
    assert a.shape == b.shape, f"{what}: shapes {a.shape} and {b.shape}"
    assert a.tobytes() == b.tobytes(), f"{what}: bits differ"
