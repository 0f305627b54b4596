"""GPUs by name: figures with sources, and residency of blocks as NVIDIA's own header computes it."""

import ctypes
import importlib.util
import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from planc.cli import main
from planc.codegen.skus import SMS, skus

# cudaOccMaxActiveBlocksPerMultiprocessor of cuda_occupancy.h, with what it asks of a device.
OCCUPANCY = """
#include <cuda_occupancy.h>
extern "C" int resident(int sm, int shared_sm, int shared_block, int threads_sm, int threads, int registers,
                        int shared) {
  cudaOccDeviceProp p;
  p.computeMajor = sm / 10; p.computeMinor = sm % 10; p.maxThreadsPerBlock = 1024;
  p.maxThreadsPerMultiprocessor = threads_sm; p.regsPerBlock = 65536; p.regsPerMultiprocessor = 65536; p.warpSize = 32;
  p.sharedMemPerBlock = 49152; p.sharedMemPerMultiprocessor = shared_sm; p.numSms = 1;
  p.sharedMemPerBlockOptin = shared_block; p.reservedSharedMemPerBlock = 1024;
  cudaOccFuncAttributes a;
  a.maxThreadsPerBlock = 1024; a.numRegs = registers; a.sharedSizeBytes = 0; a.partitionedGCConfig = PARTITIONED_GC_OFF;
  a.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN; a.maxDynamicSharedSizeBytes = shared; a.numBlockBarriers = 1;
  cudaOccDeviceState s; s.cacheConfig = CACHE_PREFER_NONE; s.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
  cudaOccResult r;
  if (cudaOccMaxActiveBlocksPerMultiprocessor(&r, &p, &a, &s, threads, shared)) return -1;
  return r.activeBlocksPerMultiprocessor;
}
"""


@pytest.fixture(scope="module")
def nvidia(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("occupancy")
    spec = importlib.util.find_spec("nvidia.cu13")
    assert spec is not None
    (root,) = spec.submodule_search_locations or ()
    (folder / "o.cpp").write_text(OCCUPANCY)
    command = ["c++", "-w", "-shared", "-fPIC", f"-I{Path(root) / 'include'}", "o.cpp", "-o", "o.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "o.so"))


@pytest.mark.parametrize("sm", SMS.values(), ids=lambda sm: sm.name)
def test_resident_blocks_are_those_of_nvidias_header(nvidia: ctypes.CDLL, sm) -> None:
    for threads in (32, 64, 128, 160, 256, 384, 1024):
        for registers in (16, 32, 40, 72, 128, 168, 200, 255):
            for shared in (0, 1, 8192, 33000, 49152, 101376, 166912, 200000, 232448):
                if shared > sm.shared_block:
                    assert sm.resident(threads, registers, shared) == 0
                    continue
                want = nvidia.resident(sm.number, sm.shared, sm.shared_block, sm.threads, threads, registers, shared)
                assert sm.resident(threads, registers, shared) == want, (threads, registers, shared)


def test_every_figure_has_a_source_and_is_plausible() -> None:
    assert len(skus()) == 18
    for sku in skus().values():
        figures = {"sms", "memory_gb", "bandwidth_gbs", "l2_mb", "nvlink_gbs"}
        assert set(sku.sources) == figures | {f"tflops.{d}" for d in sku.tflops}
        assert all(len(text) > 10 for text in sku.sources.values())
        assert 40 <= sku.sms <= 200
        assert ("fp8" in sku.tflops) == sku.sm.fp8
        assert ("fp4" in sku.tflops) == sku.sm.fp4
        assert sku.tflops.get("fp8", 2 * sku.tflops["bf16"]) == pytest.approx(2 * sku.tflops["bf16"], rel=0.02)


def test_planc_targets_lists_them() -> None:
    text = CliRunner().invoke(main, ["targets"]).output.splitlines()
    a100 = next(line for line in text if line.startswith("a100-80g "))
    assert a100.split()[-6:] == ["bf16", "f32", "int8", "int8-wo", "int4-wo", "awq"]
    assert any(line.startswith("l4 ") and " fp8 " in line for line in text)
    data = json.loads(CliRunner().invoke(main, ["targets", "--json"]).output)
    assert [row["name"] for row in data] == list(skus())
    assert data[0]["sm"]["shared_block"] == 163 * 1024
