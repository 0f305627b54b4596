"""The CPU executor: a plan directory and a number of KV blocks go in, logits of packed steps come out.

It holds the plan's shared library (one C call a step, GIL released), its weights mapped read-only, and anonymous
memory for activations and the KV cache.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planc.errors import PlancError, UsageError
from planc.plans.host import missing_flags, usable_cores
from planc.plans.schema import Plan
from planc.plans.store import MANIFEST, sha256
from planc.runtime.batch import Batch, Int32
from planc.runtime.weights import MappedWeights, addresses

MAX_SLOTS = 2**31 - 1  # slots are int32
RANK_GONE = 2  # what a step returns when another rank has ended


class _CBatch(ctypes.Structure):
    """planc_batch of the plan's C API."""

    _fields_ = (
        ("num_tokens", ctypes.c_int32),
        ("num_seqs", ctypes.c_int32),
        ("num_rows", ctypes.c_int32),
        ("table_stride", ctypes.c_int32),
        ("ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
        ("query_start", ctypes.c_void_p),
        ("logit_rows", ctypes.c_void_p),
    )


class _CChoice(ctypes.Structure):
    """planc_choice of the plan's C API."""

    _fields_ = (
        ("vocab", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("records", ctypes.c_void_p),
        ("history", ctypes.c_void_p),
        ("chosen", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
    )


class CpuExecutor:
    """Runs a plan's program. Raises PlancError when this CPU lacks the plan's ISA or a file is missing or corrupt.

    num_threads is by default the physical cores that this process may use; UsageError when it is less than 1. Of a
    plan of several ranks it is one, and must `join` the others before the first step (see ranks.py).
    """

    def __init__(
        self, root: Path, plan: Plan, num_blocks: int, num_threads: int | None = None, *, rank: int = 0
    ) -> None:
        _check_target(plan.target)
        check_paths(root, plan)
        check_threads(num_threads)
        if not plan.has_weights:
            raise PlancError(f"{root} was built with --weights none; `planc pack` adds the weights.")
        self.num_blocks = num_blocks
        self.block_size = plan.kv.block_size
        self.vocab_size = plan.limits.vocab_size
        self._handle: int | None = None
        check_file(root, plan, plan.program.library)  # loading damaged code could kill the process
        self._library = _load_library(root / plan.program.library, plan.limits.ranks)
        self._weights = [MappedWeights(root / name) for name in plan.weight_files_of(rank)]
        self._arena = _anonymous(plan.program.arena_bytes, "activations")
        self._kv = _anonymous(num_blocks * plan.kv.page_bytes, "the KV cache")
        self._logits = _logits_view(self._arena, plan)
        self._chosen = np.zeros((plan.limits.max_num_seqs, 2), np.int32)
        self._history = _anonymous(num_blocks * self.block_size * 4, "the tokens of the KV cache")
        self._names, self._num_threads = plan.program.weights, num_threads or usable_cores()
        self._handle = self._open({})

    def step(self, batch: Batch) -> NDArray[np.float32]:
        """Run one step; logits [R, vocab_size], overwritten by the next one."""
        self._run(batch, self._library.planc_step)
        return self._logits[: len(batch.logit_rows)]

    @property
    def samples(self) -> bool:
        """Whether the plan's program chooses tokens; those of older plans leave it to the host."""
        return hasattr(self._library, "planc_sample_step")

    def sample_step(self, batch: Batch, records: Int32) -> tuple[Int32, NDArray[np.float32]]:
        """Run one step and choose the tokens of its rows; see SamplingExecutor. Every step of a sequence must be run
        so, for penalties look at its tokens.
        """
        logits = self._logits[: len(batch.logit_rows)]
        choice = _CChoice(self.vocab_size, self.block_size, _pointer(records), _address(self._history))
        choice.chosen, choice.logits = _pointer(self._chosen), self._logits.ctypes.data
        step = self._library.planc_sample_step
        self._run(batch, lambda handle, given: step(ctypes.c_void_p(handle), given, ctypes.byref(choice)))
        return self._chosen[: len(logits)], logits

    def profile(self, batch: Batch) -> NDArray[np.int64]:
        """Run one step; nanoseconds of each launch, in the order of the graph's nodes but views."""
        took = np.zeros(self._measuring("planc_num_launches", ctypes.c_int32), np.int64)
        where = took.ctypes.data
        self._run(batch, lambda handle, given: self._measuring("planc_profile", ctypes.c_int, handle, given, where))
        return took

    def limit(self, what: int, threads: int, seconds: float) -> float:
        """What the machine can do at most in a second, measured: bytes read from memory (0), operations on f32 (1), on
        integers as codes are multiplied (2) and on bf16 (3), by the instructions of the plan's ISA.
        """
        given = (ctypes.c_int32(what), ctypes.c_int32(threads), ctypes.c_double(seconds))
        return float(self._measuring("planc_limit", ctypes.c_double, *given))

    def fill_cache(self) -> None:
        """Make the KV cache hold small numbers, as if it had been used: memory that was never written costs nothing to
        read.
        """
        np.frombuffer(self._kv, np.uint8)[:] = 0x3C

    def _measuring(self, name: str, result: Any, *args: Any) -> Any:
        """Call what only `planc bench` needs; PlancError when the plan is older than that."""
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise PlancError("the plan's program does not measure itself; build the plan again") from None
        function.restype = result
        return function(*(ctypes.c_void_p(a) if isinstance(a, int) else a for a in args))

    def _run(self, batch: Batch, step: Callable[..., int]) -> None:
        if self._handle is None:
            raise PlancError("the executor is closed; open the plan again to run more steps")
        table = batch.page_table
        c_batch = _CBatch(len(batch.ids), len(table), len(batch.logit_rows), table.strides[0] // table.itemsize)
        for name in ("ids", "positions", "slots", "page_table", "query_start", "logit_rows"):
            setattr(c_batch, name, _pointer(getattr(batch, name)))
        code = step(self._handle, ctypes.byref(c_batch))
        if code == RANK_GONE:
            raise PlancError("another rank of the plan is gone; start it again")
        if code != 0:
            raise PlancError(
                f"the model step returned {code} for {len(batch.ids)} tokens of {len(table)} sequences, expected 0; "
                "run planc check and planc verify on the plan"
            )

    def group_bytes(self) -> int:
        """Bytes that collectives take of the memory that ranks share; a multiple of 64."""
        return -(-int(self._library.planc_group_bytes()) // 64) * 64

    def join(self, memory: mmap.mmap, rank: int, threads: int) -> None:
        """Take part in the collectives of all ranks, which have so many threads together."""
        self._group = memory
        if self._library.planc_join(self._handle, _address(memory), rank, threads) != 0:
            raise PlancError(f"rank {rank} of the plan could not join the others; build the plan again")

    def group_failed(self) -> bool:
        """Whether a rank is known to be gone."""
        return bool(np.frombuffer(self._group, np.uint32, 1)[0])

    def fail_group(self) -> None:
        """Make every rank stop waiting for the others."""
        np.frombuffer(self._group, np.uint32, 1)[0] = 1

    def release_weights(self) -> None:
        """Give the resident pages of the weights back to the system, at any time and from any thread."""
        for weights in self._weights:
            weights.release()

    def close(self) -> None:
        """End the thread pool."""
        if self._handle is not None:
            self._library.planc_close(self._handle)
            self._handle = None

    def replace_weights(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Run with other arrays in the place of some weights, stored as those are and 64-byte aligned; all others are
        the plan's own again.
        """
        self.close()
        self._replaced = dict(arrays)  # the program reads them in place
        self._handle = self._open({name: int(array.ctypes.data) for name, array in arrays.items()})

    def _open(self, replaced: Mapping[str, int]) -> int:
        found = [replaced.get(n, a) for n, a in zip(self._names, addresses(self._weights, self._names), strict=True)]
        table = (ctypes.c_void_p * len(found))(*found)
        arena, kv = _address(self._arena), _address(self._kv)
        handle: int | None = self._library.planc_open(table, len(found), arena, kv, self._num_threads)
        if not handle:
            raise PlancError(
                f"the plan's program did not open with {self._num_threads} threads; try fewer with --threads"
            )
        return handle


def kv_blocks(plan: Plan, memory: int, max_num_seqs: int) -> int:
    """Blocks of the KV cache that `memory` bytes hold, no more than max_num_seqs full sequences or int32 slots need."""
    blocks = min(memory // plan.kv.page_bytes, max_num_seqs * plan.sequence_pages, MAX_SLOTS // plan.kv.block_size)
    if blocks < 1:
        raise PlancError(
            f"the KV cache has {max(memory, 0)} bytes and needs at least {plan.kv.page_bytes}, for one block of "
            f"{plan.kv.block_size} tokens; free memory, or raise --kv-cache-memory-bytes or --memory-utilization"
        )
    return blocks


def check_paths(root: Path, plan: Plan) -> None:
    """Raise PlancError when the manifest names code or weights outside `root`, or code that it has no hash of."""
    for name in (plan.program.library, *plan.weight_files):
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise PlancError(
                f"{root / MANIFEST} names the file {name!r}, expected a relative path below the plan. "
                "Build the plan again."
            )
    sealed = (root / MANIFEST).exists()  # a build runs its plan before it hashes it
    if sealed and plan.program.library not in plan.files:
        raise PlancError(
            f"{root / MANIFEST} has no hash of {plan.program.library}, expected one in files. Build the plan again."
        )


def check_file(root: Path, plan: Plan, name: str) -> None:
    """Raise PlancError when a file of the manifest is missing or changed. One without hashes yet lets all pass."""
    expected, path = plan.files.get(name), root / name
    if expected is not None and not path.exists():
        raise PlancError(f"{path} is missing, the manifest lists it. Build the plan again.")
    if expected is not None and sha256(path) != expected:
        raise PlancError(f"{path} has changed since the build. Build the plan again.")


def check_threads(num_threads: int | None) -> None:
    """UsageError for fewer threads than one."""
    if num_threads is not None and num_threads < 1:
        raise UsageError(f"--threads is {num_threads}, expected at least 1; leave it out to use every core")


def _check_target(target: str) -> None:
    if not target.startswith("cpu:"):
        raise PlancError(f"the plan is for {target}; this runtime serves cpu targets. Build one with --target cpu.")
    missing = missing_flags(target)
    if missing:
        raise PlancError(
            f"the plan is for {target}, but this CPU lacks {', '.join(missing)}. Build it here with --target cpu."
        )


def _load_library(path: Path, ranks: int) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path.resolve()))
        library.planc_open.restype = ctypes.c_void_p
        pointer, number = ctypes.c_void_p, ctypes.c_int32
        library.planc_open.argtypes = (pointer, number, pointer, pointer, number)
        library.planc_step.restype = ctypes.c_int
        library.planc_step.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        library.planc_close.restype = None
        library.planc_close.argtypes = (ctypes.c_void_p,)
        if ranks > 1:
            library.planc_group_bytes.restype = ctypes.c_int64
            library.planc_join.argtypes = (pointer, pointer, number, number)
    except (OSError, AttributeError) as e:
        raise PlancError(f"{path}: the plan's program cannot be loaded ({e}). Rebuild the plan.") from e
    return library


def _anonymous(size: int, what: str) -> mmap.mmap:
    """Zeroed private memory, page-aligned, in huge pages where the kernel gives them; untouched pages cost nothing."""
    try:
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as e:
        raise PlancError(f"{size} bytes for {what} cannot be had ({e}); lower --kv-cache-memory-bytes") from e
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel built without huge pages
            return memory
    return memory


def _logits_view(arena: mmap.mmap, plan: Plan) -> NDArray[np.float32]:
    limits = plan.limits
    count = limits.max_num_seqs * limits.vocab_size
    flat = np.frombuffer(arena, np.float32, count=count, offset=plan.program.logits_offset)
    return flat.reshape(limits.max_num_seqs, limits.vocab_size)


def _address(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def _pointer(values: Int32) -> int:
    return int(values.ctypes.data)
