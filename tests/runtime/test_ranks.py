"""A plan of two ranks: both take every step, and none is left waiting, or running, when one is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from planc.errors import PlancError, UsageError
from planc.plans import store
from planc.plans.check import check
from planc.runtime.executors import open_executor
from planc.runtime.goldens import Scorer
from planc.runtime.ranks import RankedExecutor
from planc.runtime.run import RunOptions, load
from planc.runtime.sequence import SamplingParams
from tests.runtime.cplan import MAX_TOKENS, expected
from tests.runtime.cranks import FATAL, write_ranked_plan

PROMPTS = ([20, 21, 22], [30], list(range(10, 50)))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan")
    write_ranked_plan(path)
    return path


@contextmanager
def opened(root: Path, blocks: int = 32) -> Iterator[RankedExecutor]:
    executor = open_executor(root, store.load(root), blocks, 2)
    assert isinstance(executor, RankedExecutor)
    try:
        yield executor
    finally:
        executor.close()


def follower(executor: RankedExecutor) -> int:
    """The process of rank 1."""
    return executor._followers[0].process.pid


def until(done: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.02)
    return done()


def gone(pid: int) -> bool:
    """Whether a process has ended, though nobody may have asked for its exit code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def test_both_ranks_take_every_step(root: Path) -> None:
    with opened(root) as executor:
        scorer = Scorer(executor, 4, MAX_TOKENS)
        made = scorer.greedy(PROMPTS, 12)
        assert made == [expected(list(p), 12) for p in PROMPTS]
        pid = follower(executor)
        executor.release_weights()
        assert scorer.greedy(PROMPTS[:1], 3) == [expected(PROMPTS[0], 3)]
        executor.close()
        assert gone(pid)
    assert executor.failure is None


def test_it_serves_as_one_rank_does(root: Path) -> None:
    loaded = load(RunOptions(root, kv_cache_memory_bytes=2 * 16 * 4 * 20, threads=2))
    try:
        assert loaded.engine.pool.num_blocks == 20  # of each rank: the bytes are those of both
        params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
        outputs = loaded.engine.generate([list(p) for p in PROMPTS], params)
        assert [list(o.token_ids) for o in outputs] == [expected(list(p), 9) for p in PROMPTS]
    finally:
        loaded.engine.close()


def test_a_step_that_is_too_large_stops_no_rank(root: Path) -> None:
    with opened(root) as executor:
        with pytest.raises(PlancError, match=f"a step of {MAX_TOKENS + 1} tokens"):
            Scorer(executor, 4, MAX_TOKENS + 1).greedy([list(range(10, 11 + MAX_TOKENS))], 1)
        assert Scorer(executor, 4, MAX_TOKENS).greedy(PROMPTS, 2) == [expected(list(p), 2) for p in PROMPTS]


def test_a_rank_that_is_killed_is_named(root: Path) -> None:
    told: list[str] = []
    with opened(root) as executor:
        executor.on_failure(told.append)
        pid = follower(executor)
        os.kill(pid, signal.SIGKILL)
        assert until(lambda: bool(told))
        assert told == [f"rank 1 (process {pid}) was ended by SIGKILL"]
        for _ in range(2):
            with pytest.raises(PlancError, match=rf"rank 1 \(process {pid}\) was ended by SIGKILL, and .* 2 ranks"):
                Scorer(executor, 4, MAX_TOKENS).greedy(PROMPTS, 2)
        late: list[str] = []
        executor.on_failure(late.append)
        assert late == told


def test_a_rank_that_ends_within_a_step_leaves_nobody_waiting(root: Path) -> None:
    with opened(root) as executor:
        started = time.monotonic()
        with pytest.raises(PlancError, match=r"rank 1 \(process \d+\) ended with exit code 3"):
            Scorer(executor, 4, MAX_TOKENS).greedy([[20, FATAL]], 1)
        assert time.monotonic() - started < 8


def test_a_rank_that_does_not_start_says_why(root: Path, tmp_path: Path) -> None:
    write_ranked_plan(tmp_path)
    (tmp_path / "weights/rank1.safetensors").unlink()
    with pytest.raises(PlancError, match=r"rank 1: .*rank1\.safetensors"), opened(tmp_path):
        pytest.fail("it opened")
    with pytest.raises(UsageError, match="--threads is 0"):
        open_executor(root, store.load(root), 8, 0)


def test_check_looks_at_the_weights_of_every_rank(root: Path, tmp_path: Path) -> None:
    assert {f.name: f.detail for f in check(root)}["weights"] == "2 tensors of each rank"
    plan = write_ranked_plan(tmp_path)
    assert [plan.weight_files_of(r) for r in range(2)] == [(name,) for name in plan.weight_files]
    (tmp_path / "weights/rank1.safetensors").unlink()
    assert any(f.name == "weights" and not f.ok and "rank1" in f.detail for f in check(tmp_path))


@contextmanager
def served(root: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`planc run` in a process group of its own, as a terminal starts it, and the process of rank 1."""
    command = [sys.executable, "-m", "planc", "run", str(root), "--port", "0", "--kv-cache-memory-bytes", "20000"]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    server = subprocess.Popen(command, text=True, env=env, process_group=0, **pipes)
    try:
        assert server.stdout is not None
        url = next((line.split()[-1] for line in server.stdout if line.startswith("serving on")), None)
        assert url is not None, server.stderr.read()
        assert until(lambda: healthy(url))
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        (rank,) = (int(pid) for pid in children)
        yield server, rank
    finally:
        server.kill()
        server.wait()


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_ranks(root: Path, number: signal.Signals) -> None:
    with served(root) as (server, rank):
        os.killpg(server.pid, number)  # Ctrl-C reaches the whole group, and rank 1 is in none of it
        _, errors = server.communicate(timeout=20)
        assert (server.returncode, errors) == (0, "")
        assert until(lambda: gone(rank))


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes in /proc")
def test_a_rank_that_dies_ends_the_server(root: Path) -> None:
    with served(root) as (server, rank):
        os.kill(rank, signal.SIGKILL)
        _, errors = server.communicate(timeout=20)
        assert server.returncode == 1
        assert f"planc: error: rank 1 (process {rank}) was ended by SIGKILL; start the server again" in errors
        assert "Traceback" not in errors


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes in /proc")
def test_ranks_end_with_a_server_that_is_killed(root: Path) -> None:
    with served(root) as (server, rank):
        os.kill(rank, signal.SIGTERM)  # rank 0 decides when to end
        assert not until(lambda: gone(rank), 0.3)
        server.kill()
        assert until(lambda: gone(rank))
