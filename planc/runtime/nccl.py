"""Collectives of GPUs that cannot reach each other's memory: in go launches of all ranks, out comes what NCCL does.

NCCL only moves bytes, captured as graphs; a kernel of the plan adds, in the order of the ranks, so that the bits are
those of GPUs that do reach each other. It needs nccl4py.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from planc.errors import PlancError
from planc.plans import ranks
from planc.plans.launches import Arg, Launch
from planc.plans.ranks import SHARED

if TYPE_CHECKING:
    from planc.runtime.cuda import CudaExecutor

_FLOAT32 = 7  # ncclFloat32
_F32 = 4
_GATHER, _EXCHANGE = "all_gather", "allto_all"  # functions of nccl4py: each rank's part to all, and its slices to each
Instead = Mapping[tuple[int, int], Sequence[Any]]  # of a bucket and a launch: graphs and launches in its place


def library(why: str) -> Any:
    """nccl4py. PlancError when it is not there, which says why it is needed."""
    try:
        return importlib.import_module("nccl.bindings.nccl")
    except ImportError as e:
        raise PlancError(f"{why}, so that ranks need NCCL ({e}); pip install 'planc[nccl]'") from None


class Nccl:
    """The ranks of NCCL, on the GPUs of executors."""

    def __init__(self, api: Any, executors: Sequence[CudaExecutor]) -> None:
        self._api, self._executors = api, executors
        with self._told("starting NCCL"):
            self._ranks = list(api.comm_init_all(len(executors), [int(e.gpu.device) for e in executors]))

    def close(self) -> None:
        """Gives NCCL's memory back."""
        while self._ranks:
            with self._told("ending NCCL"):
                self._api.comm_destroy(self._ranks.pop())

    def instead(self) -> list[Instead]:
        """What each rank has in the place of its collectives."""
        made: list[dict[tuple[int, int], Sequence[Any]]] = [{} for _ in self._executors]
        for s, step in enumerate(self._executors[0].steps):
            for n, launch in enumerate(step.launches):
                if any(a.value == SHARED for a in launch.args):
                    for rank, parts in enumerate(zip(*self._moved(launch), strict=True)):
                        made[rank][s, n] = parts
        return list(made)

    def _moved(self, launch: Launch) -> Iterator[list[Any]]:
        """The graphs and launches of all ranks, one after the other, that do what a collective does."""
        x, y, count = launch.args[0], launch.args[1], int(launch.args[2].value)
        if launch.kernel.startswith("all_gather"):
            yield self._graphs(_GATHER, x, [y] * self.count, count)
            return
        parts, done = Arg("buffer", SHARED, ranks.STAGING), 0
        if not ranks.in_one_shot(count, self.count):
            most = (ranks.nbytes(self.count) - ranks.STAGING) // _F32 // self.count
            while each := min(most, (count - done) // self.count):
                here, there = _behind(x, done), _behind(y, done)
                mine = [_behind(there, rank * each) for rank in range(self.count)]
                yield self._graphs(_EXCHANGE, here, [parts] * self.count, each)
                yield [self._sum(parts, slice, each) for slice in mine]
                yield self._graphs(_GATHER, mine, [there] * self.count, each)
                done += each * self.count
        if done < count:
            yield self._graphs(_GATHER, _behind(x, done), [parts] * self.count, count - done)
            yield [self._sum(parts, _behind(y, done), count - done)] * self.count

    @property
    def count(self) -> int:
        """How many ranks there are."""
        return len(self._executors)

    def _sum(self, parts: Arg, y: Arg, count: int) -> Launch:
        binary = next(b for b in self._executors[0].plan.binaries if b.name.startswith(ranks.SUM))
        return Launch(binary.name, (ranks.blocks(count), 1, 1), (parts, y, Arg("i64", count)), ())

    def _graphs(self, move: str, x: Arg | Sequence[Arg], y: Sequence[Arg], count: int) -> list[Any]:
        """A graph for each rank that sends `count` f32 from x, to each rank or to all, to y."""
        sources = [x] * self.count if isinstance(x, Arg) else x
        for executor in self._executors:
            executor.gpu.capture()
        with self._told(f"capturing {move}"):
            self._api.group_start()
            for executor, rank, source, target in zip(self._executors, self._ranks, sources, y, strict=True):
                places = [executor.arenas.address(str(a.value)) + a.offset for a in (source, target)]
                getattr(self._api, move)(*places, count, _FLOAT32, rank, int(executor.gpu.stream))
            self._api.group_end()
        return [executor.gpu.captured() for executor in self._executors]

    @contextmanager
    def _told(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, self._api.NCCLError) as e:  # the first: its library is not found
            raise PlancError(f"{doing} failed: {e}; pip install 'planc[nccl]' brings the library that fits") from None


def _behind(arg: Arg, count: int) -> Arg:
    """The place of so many f32 further on."""
    return Arg(arg.kind, arg.value, arg.offset + _F32 * count)
