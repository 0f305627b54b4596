"""The CPU executor over a small C library: addresses, strides, logits; and every way that a plan can be unfit."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from planc.errors import PlancError, UsageError
from planc.plans.host import usable_cpus
from planc.plans.store import load, sha256
from planc.runtime.cpu import CpuExecutor, kv_blocks
from planc.runtime.engine import Engine
from planc.runtime.scheduler import SchedulerLimits
from planc.runtime.sequence import SamplingParams
from planc.runtime.tokenizer import Tokenizer
from planc.runtime.weights import MappedWeights, addresses
from tests.runtime.cplan import BLOCK, MAX_LEN, MAX_SEQS, MAX_TOKENS, PLAN, SHIFT, expected, write_plan


@pytest.fixture
def root(tmp_path):
    write_plan(tmp_path)
    return tmp_path


@pytest.fixture
def plan(root):
    return load(root)


def test_engine_over_the_library(root, plan):
    """Chunked, batched and preempted: what the C model reads back is what was written."""
    executor = CpuExecutor(root, plan, num_blocks=10, num_threads=1)
    engine = Engine(executor, Tokenizer.load(root / "tokenizer"), SchedulerLimits(MAX_LEN, MAX_SEQS, MAX_TOKENS))
    prompts = [[11 + i] * (1 + 9 * i) for i in range(8)]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=40, temperature=0))
    assert [list(o.token_ids) for o in outputs] == [expected(prompt, 40) for prompt in prompts]
    assert engine.scheduler.preemptions > 0
    bad, good = engine.generate([[7], [8]], SamplingParams(max_tokens=3, temperature=0))
    assert "returned 3" in bad.error
    assert list(good.token_ids) == expected([8], 3)
    engine.close()
    executor.close()
    with pytest.raises(PlancError, match="closed"):
        executor.step(None)


def test_logits_are_a_view_of_the_arena(root, plan):
    executor = CpuExecutor(root, plan, num_blocks=2, num_threads=1)
    assert executor._logits.shape == (MAX_SEQS, PLAN.limits.vocab_size)
    assert executor._logits.ctypes.data % 64 == 0
    executor.close()


def test_weights_are_mapped_read_only(root):
    file = MappedWeights(root / "weights/rank0.safetensors")
    (address,) = addresses([file], ["shift"])
    assert ctypes.c_int32.from_address(address).value == SHIFT
    assert address % 64 == 0
    with open("/proc/self/smaps") as maps:
        mine = [line for line in maps if str(file.path) in line]
    assert mine
    assert all(line.split()[1] == "r--s" for line in mine)


def test_targets_this_cpu_lacks_are_refused_by_name(root, plan, monkeypatch):
    monkeypatch.setattr("planc.plans.host.cpu_flags", lambda: frozenset({"avx2"}))
    with pytest.raises(PlancError, match=r"cpu:x86-64-v4\+vnni, but this CPU lacks .*avx512_vnni"):
        CpuExecutor(root, replace(plan, target="cpu:x86-64-v4+vnni"), 2)
    with pytest.raises(PlancError, match=r"cpu:x86-64-v3\+avxvnni, but this CPU lacks .*avx_vnni"):
        CpuExecutor(root, replace(plan, target="cpu:x86-64-v3+avxvnni"), 2)
    with pytest.raises(PlancError, match="cuda:sm_90a; this runtime serves cpu"):
        CpuExecutor(root, replace(plan, target="cuda:sm_90a"), 2)


def with_library(root, plan, name):
    """The plan with another library, hashed if it is there."""
    path = root / name
    files = {**plan.files, name: sha256(path) if path.is_file() else ""}
    return replace(plan, program=replace(plan.program, library=name), files=files)


def test_unfit_plans_are_named(root, plan):
    with pytest.raises(PlancError, match="--weights none"):
        CpuExecutor(root, replace(plan, weight_files=(), options=replace(plan.options, weights="none")), 2)
    with pytest.raises(PlancError, match=r"gone\.safetensors is missing"):
        CpuExecutor(root, replace(plan, weight_files=("weights/gone.safetensors",)), 2)
    program = replace(plan.program, weights=("other", "nowhere"))
    with pytest.raises(PlancError, match="'nowhere' is missing"):
        CpuExecutor(root, replace(plan, program=program), 2)
    with pytest.raises(PlancError, match="5000 threads"):
        CpuExecutor(root, plan, 2, num_threads=5000)
    (root / "kernels/other.so").write_bytes(b"\x7fELF nonsense")
    for name, told in (("kernels/other.so", "cannot be loaded"), ("kernels/none.so", "is missing")):
        with pytest.raises(PlancError, match=told):
            CpuExecutor(root, with_library(root, plan, name), 2)


def test_code_outside_the_plan_or_without_a_hash_does_not_run(root, plan):
    for name in ("/tmp/model.so", "../model.so", "kernels/../../model.so", ""):
        with pytest.raises(PlancError, match="expected a relative path below the plan"):
            CpuExecutor(root, with_library(root, plan, name), 2)
    files = {name: digest for name, digest in plan.files.items() if name != plan.program.library}
    for without in (files, {}):
        with pytest.raises(PlancError, match=r"has no hash of kernels/model\.so"):
            CpuExecutor(root, replace(plan, files=without), 2)


def test_a_plan_that_is_not_sealed_yet_runs_without_hashes(root, plan):
    """As in a build, which writes the manifest last."""
    (root / "plan.json").unlink()
    CpuExecutor(root, replace(plan, files={}), 2).close()


@pytest.mark.parametrize("count", [0, -1])
def test_threads_below_one_are_refused(root, plan, count):
    with pytest.raises(UsageError, match=f"--threads is {count}, expected at least 1"):
        CpuExecutor(root, plan, 2, num_threads=count)


def test_a_flipped_byte_of_the_code_is_found_before_it_runs(root, plan):
    path = root / "kernels/model.so"
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(PlancError, match=r"model\.so has changed since the build"):
        CpuExecutor(root, plan, 2)


def test_cut_and_misaligned_weight_files(root):
    path = root / "weights/rank0.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(PlancError, match="cut short"):
        MappedWeights(path)
    path.write_bytes(whole[:3])
    with pytest.raises(PlancError, match="not a safetensors file"):
        MappedWeights(path)
    size = int.from_bytes(whole[:8], "little")
    path.write_bytes((size + 4).to_bytes(8, "little") + whole[8 : 8 + size] + b"    " + whole[8 + size :])
    with pytest.raises(PlancError, match="expected a multiple of 64"):
        MappedWeights(path)


def test_kv_blocks():
    page, per_seq = PLAN.kv.page_bytes, MAX_LEN // BLOCK
    assert kv_blocks(PLAN, 10 * page + 1, 4) == 10
    assert kv_blocks(PLAN, 10**9, 4) == 4 * per_seq
    for memory in (page - 1, -5):
        with pytest.raises(PlancError, match=f"needs at least {page}"):
            kv_blocks(PLAN, memory, 4)


def test_kv_blocks_stay_within_int32_slots():
    """A slot is page * block_size + offset, in an int32."""
    plan = replace(PLAN, limits=replace(PLAN.limits, max_model_len=2**20), kv=replace(PLAN.kv, page_bytes=1))
    assert kv_blocks(plan, 2**40, 2**13) * BLOCK == 2**31 - BLOCK


def test_usable_cpus_honours_the_quota(tmp_path, monkeypatch):
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr("planc.plans.host.CPU_QUOTA", quota)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert usable_cpus() == 8
    for text, count in (("max 100000", 8), ("250000 100000", 3), ("1000 100000", 1)):
        quota.write_text(text + "\n")
        assert usable_cpus() == count


def test_arena_starts_zeroed(root, plan):
    executor = CpuExecutor(root, plan, num_blocks=2, num_threads=1)
    assert not np.any(executor._logits)
    executor.close()
