"""The CUDA executor on an emulated GPU: what it computes, what it refuses, and broken plans that must be caught."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planc.emulator.run import allocated, device_of, emulated, run_emulated
from planc.errors import PlancError
from planc.plans import launches, schema, store
from planc.plans.launches import Arg, LaunchPlan
from planc.runtime import cuda_driver
from planc.runtime.batch import Batch
from planc.runtime.cuda import CudaExecutor, arena_bytes, kv_memory
from tests.emulator import counting
from tests.emulator.counting import batch, expected

BLOCKS = 8
A, B, C = list(range(20, 40)), [50, 60, 70], [80]
PAGES_A, PAGES_B, PAGES_C = [3, 5], [1], [7]


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> tuple[Path, schema.Plan]:
    root = tmp_path_factory.mktemp("cuda") / "plan"
    return root, counting.write_plan(root)


def changed(
    plan: tuple[Path, schema.Plan], folder: Path, change: Callable[[LaunchPlan], LaunchPlan]
) -> tuple[Path, schema.Plan]:
    """A copy of the plan whose launches are other ones."""
    root = folder / "plan"
    shutil.copytree(plan[0], root)
    launches.save(root, change(launches.load(root)))
    return root, store.seal(root, plan[1])


def in_graphs(change: Callable[[int, launches.Launch], launches.Launch]) -> Callable[[LaunchPlan], LaunchPlan]:
    """Changes every launch, by its place in its graph."""
    return lambda p: replace(
        p, graphs=tuple(replace(g, launches=tuple(change(n, x) for n, x in enumerate(g.launches))) for g in p.graphs)
    )


PREFILL = batch([(A, 0, PAGES_A), (B, 0, PAGES_B)])


def test_prompts_and_then_tokens_one_by_one(plan) -> None:
    a, b = list(A), list(B)
    with emulated(*plan, BLOCKS) as gpu:
        logits = gpu.executor.step(PREFILL)
        for _ in range(4):
            assert logits.shape == (2, gpu.executor.vocab_size)
            tokens = [int(t) for t in logits.argmax(-1)]
            assert tokens == expected(a, 1) + expected(b, 1)
            a.append(tokens[0])
            b.append(tokens[1])
            logits = gpu.executor.step(batch([(a, len(a) - 1, PAGES_A), (b, len(b) - 1, PAGES_B)]))
        assert gpu.statistics.launches == {"append": 5, "digest": 5, "spread": 5}


def test_a_prompt_in_pieces_beside_another_sequence(plan) -> None:
    with emulated(*plan, BLOCKS) as gpu:
        gpu.executor.step(batch([(A[:13], 0, PAGES_A[:1]), (B, 0, PAGES_B)]))
        logits = gpu.executor.step(batch([(A, 13, PAGES_A), ([*B, 5], 3, PAGES_B), (C, 0, PAGES_C)]))
        assert logits.argmax(-1).tolist() == expected(A, 1) + expected([*B, 5], 1) + expected(C, 1)


def test_the_smallest_graph_that_holds_the_batch_runs(plan, tmp_path) -> None:
    """All but the graph of one token fail here."""

    def only_one(p: LaunchPlan) -> LaunchPlan:
        far = Arg("buffer", "key", 1 << 20)
        graphs = [
            replace(g, launches=(*g.launches[:2], replace(g.launches[2], args=(far, g.launches[2].args[1]))))
            if g.tokens > 1
            else g
            for g in p.graphs
        ]
        return replace(p, graphs=tuple(reversed(graphs)))

    broken = changed(plan, tmp_path, only_one)
    (logits,) = run_emulated(*broken, [batch([(C, 0, PAGES_C)])], BLOCKS)
    assert logits.argmax(-1).tolist() == expected(C, 1)
    with pytest.raises(PlancError, match="a load of 4 bytes"):
        run_emulated(*broken, [batch([(B, 0, PAGES_B)])], BLOCKS)


def test_places_that_a_batch_leaves_empty_write_no_cache(plan) -> None:
    with emulated(*plan, BLOCKS) as gpu:
        gpu.executor.step(batch([(A, 0, PAGES_A), (B, 0, PAGES_B), (C, 0, PAGES_C)]))
        cache = gpu.state.memory.get(gpu.executor.arenas.address("kv"), (BLOCKS * 16,), np.int32)
    written = np.flatnonzero(cache != np.int32(-0x34343435))  # 0xCBCBCBCB: what fresh memory holds
    assert written.tolist() == [16, 17, 18, *range(48, 64), *range(80, 84), 112]


def test_a_step_is_one_copy_in_of_its_graphs_inputs_a_launch_and_a_copy_out(plan) -> None:
    """In buckets of 32, 1, 4 and 1 tokens, so that each finds what a larger or smaller one has left."""
    one, four = batch([(C, 0, PAGES_C)]), batch([([*B, 5], 3, PAGES_B), (C, 0, PAGES_C)])
    logits_row, found = 4 * counting.VOCAB, []
    with emulated(*plan, BLOCKS) as gpu:
        calls = counting.calls(gpu.executor.gpu)
        for step, nbytes, rows, says in (
            (PREFILL, 3 * 128 + 128 + 32 + 16, 2, expected(A, 1) + expected(B, 1)),
            (one, 3 * 16 + 32 + 16 + 4, 1, expected(C, 1)),
            (four, 3 * 16 + 128 + 32 + 16, 2, expected([*B, 5], 1) + expected(C, 1)),
            (one, 3 * 16 + 32 + 16 + 4, 1, expected(C, 1)),
        ):
            calls.clear()
            found.append(gpu.executor.step(step).argmax(-1).tolist() == says)
            assert calls == [
                ("cuCtxSetCurrent", 0),
                ("cuMemcpyHtoDAsync", nbytes),
                ("cuGraphLaunch", 0),
                ("cuMemcpyDtoHAsync", rows * logits_row),
                ("cuCtxSetCurrent", 0),
                ("cuStreamSynchronize", 0),
            ]
    assert found == [True] * 4


def test_a_step_from_another_thread(plan) -> None:
    found: list[int] = []
    with emulated(*plan, BLOCKS) as gpu:
        worker = threading.Thread(target=lambda: found.extend(gpu.executor.step(PREFILL).argmax(-1)))
        worker.start()
        worker.join(60)
    assert found == expected(A, 1) + expected(B, 1)


def test_memory_is_what_the_plan_says_and_all_of_it_is_given_back(plan) -> None:
    with emulated(*plan, BLOCKS) as gpu:
        sizes = arena_bytes(gpu.executor.plan, BLOCKS * plan[1].kv.page_bytes)
        assert gpu.used == sum(sizes.values()) > 0
        gpu.executor.close()
        gpu.executor.close()
        assert gpu.used == 0
        assert not gpu.state.pinned
        with pytest.raises(PlancError, match="the executor is closed"):
            gpu.executor.step(PREFILL)


# --- broken plans

MUTATIONS = {
    "dropped dependency": in_graphs(lambda n, x: replace(x, deps=()) if n == 1 else x),
    "another dropped dependency": in_graphs(lambda n, x: replace(x, deps=()) if n == 2 else x),
    "one element short": lambda p: replace(
        p, buffers=tuple(replace(b, nbytes=b.nbytes - 4) if b.name == "logits" else b for b in p.buffers)
    ),
    "short, and beside another argument": lambda p: replace(
        p, buffers=tuple(replace(b, nbytes=12, offset=244) if b.name == "key" else b for b in p.buffers)
    ),
    "swapped pointers": in_graphs(lambda n, x: replace(x, args=(x.args[1], x.args[0], *x.args[2:])) if n == 0 else x),
    "swapped numbers": in_graphs(lambda n, x: replace(x, args=(*x.args[:7], x.args[8], x.args[7])) if n == 1 else x),
    "wrong grid": in_graphs(lambda n, x: replace(x, grid=(x.grid[0], 1, 1)) if n == 2 else x),
    "wrong block size": lambda p: replace(p, binaries=tuple(replace(b, threads=64) for b in p.binaries)),
    "too much shared memory": lambda p: replace(p, binaries=tuple(replace(b, shared=300000) for b in p.binaries)),
    "another kernel's file": lambda p: replace(
        p, binaries=(p.binaries[0], replace(p.binaries[1], entry="spread"), p.binaries[2])
    ),
}
SAYS = {
    "dropped dependency": r"launch 0 \(append\) and launch 1 \(digest\) of a graph touch byte \d+ of buffer kv",
    "another dropped dependency": r"launch 1 \(digest\) and launch 2 \(spread\) of a graph touch byte 0 of buffer key",
    "one element short": r"kernel spread: a store of 4 bytes .* byte 4796 of buffer logits, which has 4796",
    "short, and beside another argument": r"kernel digest: a store of 4 bytes .* byte 12 of buffer key, which has 12",
    "wrong block size": "kernel append: 64 threads a block, it was compiled for 32",
    "too much shared memory": "kernel append: 300000 bytes of shared memory, an emulated sm_90 gives 232448",
    "another kernel's file": "counting-digest failed: CUDA_ERROR_NOT_FOUND .*no kernel spread; it has digest",
}
FULL = batch([(A, 0, PAGES_A), (B, 0, PAGES_B), (C, 0, PAGES_C), ([*C, 9], 0, [0])])


def right(logits: np.ndarray) -> bool:
    """Whether these are the model's logits of FULL."""
    tokens = expected(A, 1) + expected(B, 1) + expected(C, 1) + expected([*C, 9], 1)
    return np.array_equal(logits, np.eye(logits.shape[1], dtype=np.float32)[tokens])


def test_the_plan_itself_is_right(plan) -> None:
    (logits,) = run_emulated(*plan, [FULL], BLOCKS)
    assert right(logits)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_plan_is_caught(name: str, seed: int, plan, tmp_path) -> None:
    broken = changed(plan, tmp_path, MUTATIONS[name])
    if name in SAYS:
        with pytest.raises(PlancError, match=SAYS[name]):
            run_emulated(*broken, [FULL], BLOCKS, seed=seed)
        return
    try:
        (logits,) = run_emulated(*broken, [FULL], BLOCKS, seed=seed)
    except PlancError as e:
        assert "kernel" in str(e)  # noqa: PT017 - either way it is caught
    else:
        assert not right(logits)


@pytest.mark.parametrize(("step", "slots"), [(PREFILL, 128), (batch([(B, 0, PAGES_B)]), 16), (batch([(C, 0, [7])]), 4)])
def test_a_kernel_that_reads_another_input_behind_its_own_is_caught(step: Batch, slots: int, plan, tmp_path) -> None:
    """By a token more than the graph has, whose slot is what comes next: padding, or the page table."""
    change = in_graphs(lambda n, x: replace(x, grid=(x.grid[0] + 1, 1, 1)) if n == 0 else x)
    with pytest.raises(
        PlancError, match=rf"append: a load of 4 bytes .* byte {slots} of buffer slots, which has {slots};"
    ):
        run_emulated(*changed(plan, tmp_path, change), [step], BLOCKS)


def test_a_random_order_alone_shows_a_missing_edge_sooner_or_later(plan, tmp_path) -> None:
    broken = changed(plan, tmp_path, MUTATIONS["dropped dependency"])
    outcomes = [right(run_emulated(*broken, [FULL], BLOCKS, seed=s, check_order=False)[0]) for s in range(8)]
    assert True in outcomes
    assert False in outcomes


def test_after_a_kernel_has_failed_nothing_more_runs(plan, tmp_path) -> None:
    broken = changed(plan, tmp_path, MUTATIONS["one element short"])
    with emulated(*broken, BLOCKS) as gpu:
        with pytest.raises(PlancError, match="the step of 32 tokens and 4 sequences failed: CUDA_ERROR_LAUNCH_FAILED"):
            gpu.executor.step(FULL)
        with pytest.raises(PlancError, match="buffer logits, which has 4796"):
            gpu.executor.step(batch([(C, 0, PAGES_C)]))


# --- what is refused


def test_no_driver(plan, monkeypatch) -> None:
    monkeypatch.setattr(cuda_driver, "_LIBRARY", "libcuda-absent.so.1")
    with pytest.raises(PlancError, match=r"no NVIDIA driver: libcuda-absent.so.1 cannot be loaded .*--target cpu"):
        CudaExecutor(*plan, BLOCKS)


def test_no_gpu(plan) -> None:
    with emulated(*plan, BLOCKS):
        pass  # from here on this process has a driver, with no GPU
    with pytest.raises(
        PlancError, match=r"the plan is for cuda:sm_90a, but starting the driver .*CUDA_ERROR_NO_DEVICE"
    ):
        CudaExecutor(*plan, BLOCKS)


def test_no_bindings(plan, monkeypatch) -> None:
    with emulated(*plan, BLOCKS):
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
        with pytest.raises(PlancError, match=r"needs cuda.bindings .*pip install 'planc\[cuda\]'"):
            CudaExecutor(*plan, BLOCKS)
        monkeypatch.undo()


@pytest.mark.parametrize("sm", [80, 89, 100, 120])
def test_another_gpu(plan, sm: int) -> None:
    device = device_of(sm, name="NVIDIA Other")
    suffix = "a" if sm >= 90 else ""
    with pytest.raises(
        PlancError,
        match=rf"is for cuda:sm_90a \(sm_90\), this GPU is NVIDIA Other \(sm_{sm}\).*--target sm_{sm}{suffix}",
    ):
        run_emulated(*plan, [], BLOCKS, device=device)


def test_a_gpu_that_is_not_emulated() -> None:
    with pytest.raises(PlancError, match="the PTX of sm_103 is not emulated"):
        device_of(103)


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        (256, r"512 bytes for the weights do not fit .*: 256 of 256 bytes are free; the model does not fit"),
        (768, r"512 bytes for the KV cache do not fit .*: 256 of 768 bytes are free; lower --kv-cache-memory-bytes"),
        (1280, r"\d+ bytes for activations .* free; build the plan with a smaller --max-num-batched-tokens"),
    ],
)
def test_too_little_memory(plan, memory: int, says: str) -> None:
    with pytest.raises(PlancError, match=says):
        run_emulated(*plan, [], BLOCKS, device=device_of(90, memory))


def test_memory_is_counted_without_weights(plan, tmp_path) -> None:
    root, sealed = changed(plan, tmp_path, lambda p: replace(p, arenas=p.arenas | {"weights": 60 << 30}))
    (root / "weights/rank0.safetensors").unlink()
    sizes = arena_bytes(launches.load(root), 1000 * sealed.kv.page_bytes)
    assert allocated(root, sealed, 1000) == sum(sizes.values()) > 60 << 30
    with pytest.raises(PlancError, match="bytes for the weights do not fit"):
        allocated(root, sealed, 1000, device_of(90, 40 << 30))


def test_memory_for_the_cache_is_a_share_less_what_the_model_takes(plan) -> None:
    with emulated(*plan, BLOCKS, device=device_of(90, 100_000)) as gpu:
        taken = sum(arena_bytes(gpu.executor.plan, 0).values())
        assert kv_memory(*plan, 0.9) == 90_000 - gpu.used - taken


def test_a_batch_that_no_graph_holds(plan) -> None:
    with (
        emulated(*plan, BLOCKS) as gpu,
        pytest.raises(PlancError, match=r"40 tokens of 1 sequences with 1 rows .*--max-num-batched-tokens"),
    ):
        gpu.executor.step(batch([(list(range(40)), 0, [0, 1, 2])]))


@pytest.mark.parametrize("file", ["kernels/counting-digest.cubin", "kernels/launches.json"])
def test_a_file_that_changed(file: str, plan, tmp_path) -> None:
    root, sealed = changed(plan, tmp_path, lambda p: p)
    with open(root / file, "ab") as f:
        f.write(b"\n")
    with pytest.raises(PlancError, match=r"has changed since the build|cannot be read"):
        run_emulated(root, sealed, [], BLOCKS)


def test_ptx_that_is_not_the_cubins(plan, tmp_path) -> None:
    root, sealed = changed(plan, tmp_path, lambda p: p)
    shutil.copy(root / "kernels/counting-digest.ptx", root / "kernels/counting-spread.ptx")
    with pytest.raises(PlancError, match="loading kernel counting-spread failed: CUDA_ERROR_INVALID_IMAGE"):
        run_emulated(root, sealed, [], BLOCKS)
    (root / "kernels/counting-spread.ptx").unlink()
    with pytest.raises(PlancError, match=r"counting-spread.ptx cannot be read .*needs each kernel's PTX"):
        run_emulated(root, sealed, [], BLOCKS)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"target": "cpu:portable"}, "runs plans for cuda targets"),
        ({"options": replace(counting.PLAN.options, weights="none")}, "built with --weights none"),
    ],
    ids=["target", "weights"],
)
def test_plans_that_this_executor_does_not_run(plan, change: dict, says: str) -> None:
    with pytest.raises(PlancError, match=says):
        CudaExecutor(plan[0], replace(plan[1], **change), BLOCKS)


def test_weights_of_another_size(plan, tmp_path) -> None:
    def longer(p: LaunchPlan) -> LaunchPlan:
        return replace(p, buffers=tuple(replace(b, nbytes=8) if b.name == "shift" else b for b in p.buffers))

    with pytest.raises(PlancError, match="weight 'shift' has 4 bytes in the plan's weights, 8 in its launches"):
        run_emulated(*changed(plan, tmp_path, longer), [], BLOCKS)
