"""The interpreter of kernel sources: rounding, products, checked accesses, and compiling in the same process."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from planc.emulator import interpreter
from planc.errors import PlancError

Array = np.ndarray
SOURCE = """
import triton
import triton.language as tl


@triton.jit
def _twice(x):
    return x + x


@triton.jit
def convert(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(y_ptr + i, _twice(x).to(y_ptr.dtype.element_ty), mask=i < n)


@triton.jit
def product(a_ptr, b_ptr, y_ptr, EXACT: tl.constexpr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    at = i[:, None] * SIZE + i[None, :]
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    if EXACT:
        acc = tl.zeros((SIZE, SIZE), tl.int32)
    else:
        acc = tl.zeros((SIZE, SIZE), tl.float32)
    acc = tl.dot(a, b, acc, input_precision="ieee")
    tl.store(y_ptr + at, acc)


@triton.jit
def total(x_ptr, y_ptr, SIZE: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, SIZE))
    tl.store(y_ptr, tl.sum(x, axis=0))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kernels") / "sample.py"
    path.write_text(SOURCE)
    return path


def launch(
    source: Path, name: str, constants: dict[str, object], arrays: dict[str, tuple[str, Array]], **numbers: int
) -> None:
    signature = {n: kind for n, (kind, _) in arrays.items()} | dict.fromkeys(numbers, "i32")
    values = {n: a.ctypes.data for n, (_, a) in arrays.items()} | numbers
    memory = interpreter.Memory.of([(a.ctypes.data, a.nbytes) for _, a in arrays.values()])
    interpreter.launch(source, name, signature, constants, (2, 1, 1) if numbers else (1, 1, 1), values, memory)


@pytest.mark.parametrize(
    ("kind", "dtype", "limit"),
    [
        ("*bf16", ml_dtypes.bfloat16, 3e38),
        ("*fp8e4nv", ml_dtypes.float8_e4m3fn, 448),
        ("*fp8e5", ml_dtypes.float8_e5m2, 57344),
    ],
)
def test_floats_are_rounded_to_the_nearest_and_fp8_saturates(
    source: Path, kind: str, dtype: type, limit: float
) -> None:
    x = np.random.default_rng(0).normal(size=100).astype(np.float32) * np.float32(200)
    y = np.zeros(100, dtype)
    launch(source, "convert", {"BLOCK": 64}, {"x_ptr": ("*fp32", x), "y_ptr": (kind, y)}, n=100)
    np.testing.assert_array_equal(y, np.clip(x + x, -limit, limit).astype(dtype))


@pytest.mark.parametrize(
    ("kind", "dtype"), [("*bf16", ml_dtypes.bfloat16), ("*fp8e4nv", ml_dtypes.float8_e4m3fn), ("*fp32", np.float32)]
)
def test_products_of_narrow_floats(source: Path, kind: str, dtype: type) -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.normal(size=(32, 32)).astype(np.float32).astype(dtype) for _ in range(2))
    y = np.zeros((32, 32), np.float32)
    arrays = {"a_ptr": (kind, a), "b_ptr": (kind, b), "y_ptr": ("*fp32", y)}
    launch(source, "product", {"EXACT": False, "SIZE": 32}, arrays)
    np.testing.assert_allclose(y, a.astype(np.float64) @ b.astype(np.float64), rtol=1e-5, atol=1e-5)


def test_products_of_integers_are_exact(source: Path) -> None:
    rng = np.random.default_rng(2)
    a, b = (rng.integers(-127, 128, (32, 32)).astype(np.int8) for _ in range(2))
    y = np.zeros((32, 32), np.int32)
    arrays = {"a_ptr": ("*i8", a), "b_ptr": ("*i8", b), "y_ptr": ("*i32", y)}
    launch(source, "product", {"EXACT": True, "SIZE": 32}, arrays)
    np.testing.assert_array_equal(y, a.astype(np.int64) @ b.astype(np.int64))


def test_an_access_past_a_buffer_names_the_kernel_and_the_program(source: Path) -> None:
    x, y = np.ones(100, np.float32), np.zeros(100, np.float32)
    arrays = {"x_ptr": ("*fp32", x), "y_ptr": ("*fp32", y)}
    with pytest.raises(PlancError, match=r"kernel convert, program \(1, 0, 0\): a load of 4 bytes is outside"):
        launch(source, "convert", {"BLOCK": 64}, arrays, n=101)
    assert (y[64:] == 0).all(), "the program must stop before it writes"


def test_an_unknown_kernel_is_named(source: Path) -> None:
    with pytest.raises(PlancError, match=r"sample\.py has no kernel 'nothing'"):
        interpreter.launch(source, "nothing", {}, {}, (1, 1, 1), {})


def test_kernels_compile_after_the_interpreter_ran(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The language is patched only while a launch runs; tl.sum is a function of the language that is patched."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    x, y = np.arange(32, dtype=np.float32), np.zeros(1, np.float32)
    launch(source, "total", {"SIZE": 32}, {"x_ptr": ("*fp32", x), "y_ptr": ("*fp32", y)})
    assert y[0] == x.sum()
    function = interpreter.load(source, interpreted=False).total
    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "SIZE": "constexpr"}
    made = compile(
        ASTSource(fn=function, signature=signature, constexprs={"SIZE": 32}), target=GPUTarget("cuda", 80, 32)
    )
    assert ".visible .entry total" in made.asm["ptx"]
