"""The stand-in driver, called through cuda.bindings: copies, streams, tensor maps, launches, and what it refuses."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cuda.bindings import driver as cu

from planc.codegen.cuda.toolchain import Worker, toolchain
from planc.emulator import driver
from planc.emulator.device import State
from planc.emulator.run import device_of, run_kernel
from planc.errors import PlancError

BF16 = ml_dtypes.bfloat16
SOURCE = Path(__file__).parent / "kernels/tiles.py"
M, N, K = 250, 256, 192  # M is no multiple of the tile


def done(result: tuple[Any, ...]) -> Any:
    """The results of a call that must succeed."""
    code, *rest = result
    assert int(code) == 0, (code, done(cu.cuGetErrorString(code)))
    return rest[0] if len(rest) == 1 else rest


def says(result: tuple[Any, ...]) -> tuple[str, str]:
    """The name and the text of a failure."""
    assert int(result[0]) != 0
    return result[0].name, done(cu.cuGetErrorString(result[0])).decode()


@pytest.fixture
def gpu() -> Iterator[State]:
    state = State(device_of(90, 1 << 30, "NVIDIA Test"), {}, 0)
    with driver.active(state):
        done(cu.cuInit(0))
        done(cu.cuCtxSetCurrent(done(cu.cuDevicePrimaryCtxRetain(done(cu.cuDeviceGet(0))))))
        yield state


def test_the_device_is_what_was_asked_for(gpu) -> None:
    device = done(cu.cuDeviceGet(0))
    attribute = cu.CUdevice_attribute
    names = ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
    values = [done(cu.cuDeviceGetAttribute(getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{n}"), device)) for n in names]
    assert values == [9, 0, 232448]
    assert done(cu.cuDeviceGetName(64, device)).partition(b"\0")[0] == b"NVIDIA Test"
    assert done(cu.cuDeviceTotalMem(device)) == 1 << 30
    assert done(cu.cuDriverGetVersion()) >= 13000
    assert done(cu.cuMemGetInfo()) == [1 << 30, 1 << 30]


def test_memory_is_counted_and_holes_are_watched(gpu) -> None:
    first, second = int(done(cu.cuMemAlloc(1000))), int(done(cu.cuMemAlloc(5000)))
    assert done(cu.cuMemGetInfo())[0] == (1 << 30) - 1024 - 5120
    data = np.arange(1000, dtype=np.uint8)
    done(cu.cuMemcpyHtoD(first, data.ctypes.data, 1000))
    back = np.zeros(1000, np.uint8)
    done(cu.cuMemcpyDtoH(back.ctypes.data, first, 1000))
    assert (back == data).all()
    assert says(cu.cuMemcpyHtoD(first, data.ctypes.data, 1001))[0] == "CUDA_ERROR_INVALID_VALUE"
    assert says(cu.cuMemcpyDtoH(back.ctypes.data, second + 4500, 1000))[0] == "CUDA_ERROR_INVALID_VALUE"
    assert says(cu.cuMemFree(first + 8)) == ("CUDA_ERROR_INVALID_VALUE", f"no allocation starts at 0x{first + 8:x}")
    assert says(cu.cuMemAlloc(1 << 30)) == (
        "CUDA_ERROR_OUT_OF_MEMORY",
        f"{1 << 30} bytes were asked for, {(1 << 30) - 6144} are free",
    )
    done(cu.cuMemFree(first))
    done(cu.cuMemFree(second))
    assert done(cu.cuMemGetInfo())[0] == 1 << 30


def test_copies_of_pinned_memory_wait_for_their_stream(gpu) -> None:
    stream = done(cu.cuStreamCreate(1))
    address, host = int(done(cu.cuMemAlloc(64))), np.zeros(128, np.uint8)
    done(cu.cuMemHostRegister(host.ctypes.data, 128, 0))
    host[:64] = 1
    done(cu.cuMemcpyHtoDAsync(address, host.ctypes.data, 64, stream))
    host[:64] = 2  # too early: the copy may come later, and does
    done(cu.cuMemcpyDtoHAsync(host.ctypes.data + 64, address, 64, stream))
    assert not host[64:].any()
    done(cu.cuStreamSynchronize(stream))
    assert (host[64:] == 2).all()
    done(cu.cuMemsetD8Async(address, 7, 64, stream))
    done(cu.cuMemcpyDtoH(host.ctypes.data, address, 64))
    assert (host[:64] == 7).all()
    done(cu.cuMemHostUnregister(host.ctypes.data))
    done(cu.cuStreamDestroy(stream))


def test_events_happen_when_their_stream_comes_to_them(gpu) -> None:
    stream = done(cu.cuStreamCreate(1))
    start, stop = (done(cu.cuEventCreate(0)) for _ in range(2))
    done(cu.cuEventRecord(start, stream))
    gpu.enqueue(int(stream), lambda: time.sleep(0.02))
    done(cu.cuEventRecord(stop, stream))
    assert says(cu.cuEventElapsedTime(start, stop))[1] == "an event that no stream has come to yet"
    done(cu.cuStreamSynchronize(stream))
    assert 20 <= done(cu.cuEventElapsedTime(start, stop)) < 2000
    done(cu.cuEventDestroy(start))
    assert says(cu.cuEventElapsedTime(start, stop))[0] == "CUDA_ERROR_INVALID_HANDLE"


def test_what_is_no_cubin_and_what_is_no_handle(gpu) -> None:
    assert says(cu.cuModuleLoadData(b".version 9.0\n" + bytes(64)))[1].startswith("not a cubin")
    elf = b"\x7fELF" + bytes(60)
    assert says(cu.cuModuleLoadData(elf))[1] == "there is no PTX beside a cubin of 64 bytes"
    graph = done(cu.cuGraphCreate(0))
    assert says(cu.cuGraphAddKernelNode(graph, None, 0, cu.CUDA_KERNEL_NODE_PARAMS()))[0] == "CUDA_ERROR_INVALID_HANDLE"
    assert says(cu.cuStreamSynchronize(cu.CUstream(0x77)))[0] == "CUDA_ERROR_INVALID_HANDLE"
    with pytest.raises(PlancError, match="an emulated GPU is in use already"), driver.active(gpu):
        raise AssertionError


def test_a_real_driver_in_the_process_is_not_replaced(tmp_path) -> None:
    (tmp_path / "real.c").write_text("int cuInit(unsigned flags) { return flags; }\n")
    library = tmp_path / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, tmp_path / "real.c"]
    subprocess.run(command, check=True)
    script = (
        "import ctypes, sys\nfrom planc.emulator import driver, run\n"
        "ctypes.CDLL(sys.argv[1])\n"
        "with driver.active(driver.State(run.device_of(90, 1 << 20), {}, 0)): print('replaced')"
    )
    ended = subprocess.run([sys.executable, "-c", script, library], capture_output=True, text=True, timeout=120)
    assert "run planc verify --emulate as a process of its own" in ended.stderr
    assert "replaced" not in ended.stdout


@pytest.mark.parametrize(
    ("compiler", "cache", "says"),
    [("cc-absent", "cache", "install a C compiler, or set CC"), ("cc", "file/cache", "set PLANC_CACHE_DIR")],
)
def test_a_library_that_cannot_be_built(compiler: str, cache: str, says: str, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    script = "from planc.emulator import library; library.install(lambda name: None)"
    environment = os.environ | {"CC": compiler, "PLANC_CACHE_DIR": str(tmp_path / cache)}
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120)
    assert says in ended.stderr.splitlines()[-1]


# --- TMA


class Compiled:
    """One kernel of tiles.py."""

    def __init__(self, worker: Worker, function: str, signature: dict[str, str], arch: int, folder: Path) -> None:
        out = folder / f"{function}{arch}"
        job = {"source": str(SOURCE), "function": function, "signature": signature, "arch": arch, "out": str(out)}
        job |= {"constants": {"BM": 128, "BN": 128, "BK": 64}, "num_warps": 8, "num_stages": 3}
        answer = worker.compile(job | {"aligned": [a for a in ("a_ptr", "w_ptr", "y_ptr", "N", "K") if a in signature]})
        self.entry, self.shared, self.scratch = answer["entry"], answer["shared"], answer["scratch"]
        self.cubin, self.ptx = Path(f"{out}.cubin").read_bytes(), Path(f"{out}.ptx").read_text()


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    made = Worker(toolchain())
    yield made
    made.close()


def operands() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    a, w = (rng.standard_normal((rows, K)).astype(BF16) for rows in (M, N))
    return a, w, a.astype(np.float32) @ w.astype(np.float32).T


def tensor_map(address: int, rows: int, columns: int) -> Any:
    """64 columns of 128 rows a tile, rows of 128 bytes swizzled: what Triton asks for."""
    big, small = cu.cuuint64_t, cu.cuuint32_t
    return done(
        cu.cuTensorMapEncodeTiled(
            cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            2,
            address,
            [big(columns), big(rows)],
            [big(2 * columns)],
            [small(64), small(128)],
            [small(1), small(1)],
            cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
            cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


@pytest.mark.parametrize("arch", [90, *(pytest.param(n, marks=pytest.mark.slow) for n in (100, 120))])
def test_tiles_by_descriptors_of_the_host(arch: int, worker, tmp_path) -> None:
    signature = {"a_desc": "tensordesc<bf16[128,64]>", "w_desc": "tensordesc<bf16[128,64]>"}
    signature |= {"y_desc": "tensordesc<bf16[128,128]>", "K": "i32"}
    kernel = Compiled(worker, "by_host", signature, arch, tmp_path)
    assert "cp.async.bulk.tensor" in kernel.ptx
    a, w, want = operands()
    got = np.zeros((M, N), BF16)
    with driver.active(State(device_of(arch, 1 << 30), {sha256(kernel.cubin).hexdigest(): kernel.ptx}, 0)):
        function = done(cu.cuModuleGetFunction(done(cu.cuModuleLoadData(kernel.cubin)), kernel.entry.encode()))
        limit = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        done(cu.cuFuncSetAttribute(function, limit, kernel.shared))
        values: list[Any] = []
        places = []
        for array in (a, w, got):
            places.append(int(done(cu.cuMemAlloc(array.nbytes))))
            done(cu.cuMemcpyHtoD(places[-1], array.ctypes.data, array.nbytes))
            rows, columns = array.shape
            opaque = ctypes.string_at(int(tensor_map(places[-1], rows, columns).getPtr()), 128)
            values += [ctypes.create_string_buffer(opaque, 128), *map(ctypes.c_int32, (rows, columns))]
            values += [ctypes.c_int64(columns), ctypes.c_int64(1)]
        values += [ctypes.c_int32(K), ctypes.c_uint64(0), ctypes.c_uint64(0)]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        done(cu.cuLaunchKernel(function, 2, 2, 1, 256, 1, 1, kernel.shared, 0, ctypes.addressof(pointers), 0))
        done(cu.cuMemcpyDtoH(got.ctypes.data, places[2], got.nbytes))
    np.testing.assert_allclose(got.astype(np.float32), want, rtol=1e-2, atol=1e-1)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, 100, 120])
def test_tiles_by_descriptors_of_the_kernel(arch: int, worker, tmp_path) -> None:
    signature = {name: "*bf16" for name in ("a_ptr", "w_ptr", "y_ptr")} | {name: "i32" for name in "MNK"}
    kernel = Compiled(worker, "by_kernel", signature, arch, tmp_path)
    assert kernel.scratch
    a, w, want = operands()
    got, scratch = np.zeros((M, N), BF16), np.zeros(4 * kernel.scratch, np.uint8)
    run_kernel(kernel.ptx, (2, 2, 1), [a, w, got, M, N, K, scratch, 0], kernel.shared)
    np.testing.assert_allclose(got.astype(np.float32), want, rtol=1e-2, atol=1e-1)
