"""Kernel sources on the CPU: in go a source file, a function, constants and host addresses, out come written buffers.

Triton's interpreter runs a kernel's Python with numpy. It keeps bf16 and fp8 as bare integers and computes wrongly on
them, so here they are ml_dtypes arrays, rounded as the GPU rounds them. A source is loaded twice, once to be compiled
and once to be interpreted, and the language is patched only while a launch runs: both live in one process. Accesses
are checked against the buffers that a launch names.
"""

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
from triton import knobs
from triton._C.libtriton import interpreter as native
from triton.runtime import interpreter as stock
from triton.runtime.jit import JITFunction

from planc.errors import PlancError

Array = np.ndarray
DType = np.dtype[Any]
_NARROW: Mapping[Any, DType] = {
    tl.bfloat16: np.dtype(ml_dtypes.bfloat16),
    tl.float8e4nv: np.dtype(ml_dtypes.float8_e4m3fn),
    tl.float8e5: np.dtype(ml_dtypes.float8_e5m2),
}
_BITS: Mapping[int, DType] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16)}
# Conversions to fp8 saturate on the GPU (cvt.rn.satfinite).
_LARGEST = {np.dtype(ml_dtypes.float8_e4m3fn): 448.0, np.dtype(ml_dtypes.float8_e5m2): 57344.0}
_SCALARS: Mapping[str, Any] = {
    "i1": (np.bool_, tl.int1),
    "i8": (np.int8, tl.int8),
    "i16": (np.int16, tl.int16),
    "i32": (np.int32, tl.int32),
    "i64": (np.int64, tl.int64),
    "u8": (np.uint8, tl.uint8),
    "u32": (np.uint32, tl.uint32),
    "u64": (np.uint64, tl.uint64),
    "fp16": (np.float16, tl.float16),
    "fp32": (np.float32, tl.float32),
    "fp64": (np.float64, tl.float64),
}
_IMPORTED = re.compile(r"(?<=^from )planc\.codegen\.cuda\.kernels\.(\w+)(?= import)", re.MULTILINE)
_stock_dtype = stock._get_np_dtype


@dataclass(frozen=True)
class Memory:
    """The bytes that a launch may touch: sorted, disjoint starts and ends of buffers."""

    starts: Array
    ends: Array

    @classmethod
    def of(cls, buffers: Sequence[tuple[int, int]]) -> "Memory":
        """From (address, bytes) of each buffer; the same buffer may be there twice."""
        known = sorted({(start, start + size) for start, size in buffers if size})
        return cls(np.array([s for s, _ in known], np.uint64), np.array([e for _, e in known], np.uint64))

    def check(self, what: str, addresses: Array, itemsize: int) -> None:
        """PlancError unless every access lies inside of one buffer and is aligned to its size."""
        if not addresses.size:
            return
        at = np.searchsorted(self.starts, addresses, side="right") - 1
        inside = (at >= 0) & (addresses + np.uint64(itemsize) <= self.ends[np.maximum(at, 0)])
        if not inside.all():
            first = int(addresses[~inside].flat[0])
            near = max(int(at[~inside].flat[0]), 0)
            gap = first - int(self.ends[near]) if len(self.ends) else first
            raise PlancError(
                f"a {what} of {itemsize} bytes is outside of every buffer, {gap} bytes past the nearest end"
            )
        if (addresses % np.uint64(itemsize)).any():
            raise PlancError(f"a {what} of {itemsize} bytes is not aligned")


class _Builder(stock.InterpreterBuilder):  # type: ignore[misc]
    """Triton's builder of numpy values, with the narrow floats right and accesses checked."""

    memory: Memory | None = None

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, cache_policy: Any, is_volatile: Any) -> Any:
        kind = ptrs.get_element_ty()
        dtype = _dtype(kind)
        self._check("load", ptrs, mask, dtype)
        raw = _raw(dtype)
        fill = np.zeros(ptrs.data.shape, raw) if other is None else np.ascontiguousarray(other.data).view(raw)
        return stock.TensorHandle(native.load(ptrs.data, mask.data, fill, raw).view(dtype), kind)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, cache_policy: Any) -> Any:
        self._check("store", ptrs, mask, value.data.dtype)
        return native.store(ptrs.data, np.ascontiguousarray(value.data).view(_raw(value.data.dtype)), mask.data)

    def _check(self, what: str, ptrs: Any, mask: Any, dtype: DType) -> None:
        if self.memory is not None:
            lanes = np.broadcast_to(mask.data, ptrs.data.shape)
            self.memory.check(what, ptrs.data[lanes], dtype.itemsize)

    def cast_impl(self, src: Any, kind: Any) -> Any:
        return stock.TensorHandle(_cast(src.data, _dtype(kind)), kind.scalar)

    create_si_to_fp = create_ui_to_fp = create_fp_to_si = create_fp_to_ui = cast_impl
    create_fp_ext = create_fp_trunc = cast_impl

    def create_int_cast(self, src: Any, kind: Any, signed: bool) -> Any:
        return self.cast_impl(src, kind)

    def create_fp_to_fp(self, src: Any, kind: Any, rounding: Any) -> Any:
        return self.cast_impl(src, kind)

    def create_dot(self, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        """Products in float64, rounded once: exact for integers, and the same for a row wherever it lies in its tile,
        which float32 of a BLAS is not."""
        made = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(d.data.dtype) + d.data
        return stock.TensorHandle(made, d.dtype.scalar)

    def create_precise_divf(self, lhs: Any, rhs: Any) -> Any:
        return self.binary_op(lhs, rhs, np.divide)


def _dtype(kind: Any) -> DType:
    """The numpy dtype of a Triton type."""
    element = kind.element_ty if isinstance(kind, tl.block_type) else kind
    if not isinstance(element, tl.pointer_type) and element in _NARROW:
        return _NARROW[element]
    made: DType = np.dtype(_stock_dtype(kind))
    return made


def _raw(dtype: DType) -> DType:
    """What the native code moves: narrow floats as their bits."""
    return _BITS[dtype.itemsize] if dtype in _NARROW.values() else dtype


def _cast(x: Array, to: DType) -> Array:
    """Rounds to nearest even; fp8 saturates. Floats become integers by dropping the fraction."""
    if x.dtype == to:
        return x
    if x.dtype in _NARROW.values() or to in _LARGEST:
        x = x.astype(np.float32)
    if to in _LARGEST:
        x = np.clip(x, -_LARGEST[to], _LARGEST[to])
    return x.astype(to)


@lru_cache(maxsize=64)
def load(path: Path, *, interpreted: bool) -> ModuleType:
    """The module of a kernel source, its functions to be interpreted or to be compiled."""
    name = f"planc_kernels_{'interpreted' if interpreted else 'compiled'}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PlancError(f"{path} is no kernel source")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # inspect finds a function's source through it
    names = _IMPORTED.finditer(path.read_text())
    imported = {m[0]: load(path.with_name(f"{m[1]}.py"), interpreted=interpreted) for m in names}
    with knobs.runtime.scope(), _modules(imported):
        knobs.runtime.interpret = interpreted
        spec.loader.exec_module(module)
    return module


_ABSENT = object()


@contextmanager
def _modules(known: Mapping[str, ModuleType]) -> Iterator[None]:
    """Imports by these names give these modules, for a while."""
    before = {name: sys.modules.get(name) for name in known}
    sys.modules.update(known)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


class _Patches:
    """Attributes that are set for a while."""

    def __init__(self) -> None:
        self._saved: list[tuple[Any, str, Any]] = []

    def set_attr(self, owner: Any, name: str, value: Any) -> None:
        self._saved.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def restore(self) -> None:
        for owner, name, value in reversed(self._saved):
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._saved.clear()


@lru_cache(maxsize=512)
def _interpreted(fn: Callable[..., Any]) -> Any:
    return stock.InterpretedFunction(fn)


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A function called by a kernel: the language is patched already."""
    return function.rewrite()(*args, **kwargs)


# One for all launches: rewritten functions keep a reference to the semantic.
_BUILDER = _Builder()
_SEMANTIC = stock.TritonSemantic(_BUILDER)


def _patch() -> _Patches:
    builder, patches = _BUILDER, _Patches()
    patches.set_attr(stock, "_get_np_dtype", _dtype)
    patches.set_attr(stock, "interpreter_builder", builder)
    patches.set_attr(stock, "interpreter_semantic", _SEMANTIC)
    patches.set_attr(stock.InterpretedFunction, "__call__", _call)
    for module in (tl, tl.core, tl.standard, tl.math, tl.random):
        for name, member in list(vars(module).items()):
            if isinstance(member, JITFunction):
                patches.set_attr(module, name, _interpreted(member.fn))
    for module in (tl, tl.core):
        stock._patch_builtin(module, builder, patches)
        stock._patch_builtin(module.tensor, builder, patches)
        stock._patch_lang_tensor(module.tensor, patches)
        stock._patch_lang_core(module, patches)
    stock._patch_builtin(tl.math, builder, patches)
    stock._patch_builtin(tl.core.tensor_descriptor_base, builder, patches)
    return patches


@contextmanager
def _session(memory: Memory | None) -> Iterator[None]:
    """The language as the interpreter needs it; as it was on exit, so that kernels compile afterwards."""
    patches = _patch()
    _BUILDER.memory = memory
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        _BUILDER.memory = None
        patches.restore()


def launch(
    path: Path,
    function: str,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    grid: tuple[int, int, int],
    values: Mapping[str, int | float],
    memory: Memory | None = None,
) -> None:
    """Runs every program of the grid. `values` holds a number for each argument of `signature`: for a pointer the
    address in this process. `memory` bounds what may be accessed; PlancError names the kernel and the program."""
    kernel = getattr(load(path, interpreted=True), function, None)
    if kernel is None:
        raise PlancError(f"{path.name} has no kernel {function!r}")
    with _session(memory):
        body = kernel.rewrite()
        args = {n: _argument(signature[n], values[n]) if n in signature else constants[n] for n in kernel.arg_names}
        _BUILDER.set_grid_dim(*grid)
        for z, y, x in product(*(range(n) for n in reversed(grid))):
            _BUILDER.set_grid_idx(x, y, z)
            try:
                body(**args)
            except PlancError as e:
                raise PlancError(f"kernel {function}, program ({x}, {y}, {z}): {e}") from e


def _argument(kind: str, value: int | float) -> Any:
    """A run-time argument as the interpreter holds it."""
    if kind.startswith("*"):
        element = tl.str_to_ty(kind, None)
        return tl.tensor(stock.TensorHandle(np.array([value], np.uint64), element), element)
    dtype, scalar = _SCALARS[kind]
    return tl.tensor(stock.TensorHandle(np.array([value], dtype), scalar), scalar)
