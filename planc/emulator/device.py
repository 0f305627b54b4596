"""The emulated GPU's state: in go a device's figures, out come memory, modules, streams and graphs that a driver needs.

Work is enqueued on streams and runs when someone waits for it, as on a GPU: a missing wait shows as a wrong result. Of
several GPUs one does something, then another, in a random order: kernels that wait for each other go on so.
"""

from __future__ import annotations

import hashlib
import random
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from planc.codegen.cuda.cubin import Cubin, Resources
from planc.codegen.cuda.cubin import read as read_cubin
from planc.emulator import ptx
from planc.emulator.compile import Program
from planc.emulator.machine import Grid, running
from planc.emulator.memory import Memory, OutOfMemory, Spans, tagged
from planc.emulator.order import Touched, random_order
from planc.errors import PlancError

PLAIN_SHARED = 48 << 10  # dynamic shared bytes of a kernel that asks for no more
_GRID = (2**31 - 1, 65535, 65535)
_ENDED = object()

# CUresult
SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NO_DEVICE, INVALID_DEVICE, INVALID_IMAGE = 0, 1, 2, 100, 101, 200
NO_BINARY_FOR_GPU, PEERS_ALREADY, NO_PEERS = 209, 704, 217
INVALID_HANDLE, NOT_FOUND, LAUNCH_FAILED, UNKNOWN = 400, 500, 719, 999


class Failure(Exception):
    """A driver call that fails: its CUresult, and what is wrong."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


@dataclass(frozen=True)
class Device:
    """What a GPU of a compute capability (90) offers; `shared_block` is the shared memory that a block may get, `peers`
    says whether GPUs reach each other's memory.
    """

    name: str
    sm: int
    memory: int
    shared_block: int
    multiprocessors: int = 1
    peers: bool = True


@dataclass
class Module:
    """A loaded cubin, with the PTX that it was made of."""

    image: Cubin
    kernels: Mapping[str, ptx.Kernel]


@dataclass
class Function:
    """A kernel of a module."""

    name: str
    resources: Resources
    kernel: ptx.Kernel
    shared_limit: int = PLAIN_SHARED


@dataclass
class Node:
    """A node of a graph, and those before it."""

    deps: tuple[int, ...]

    @property
    def name(self) -> str:
        return "a graph"


@dataclass
class Kernel(Node):
    """A kernel launch of a graph."""

    function: Function
    grid: Grid
    params: bytes

    @property
    def name(self) -> str:
        return self.function.name


@dataclass
class Child(Node):
    """A graph in a graph."""

    graph: Graph


@dataclass
class Captured(Node):
    """What was enqueued on a stream whose work goes to a graph."""

    work: Callable[[], object]


@dataclass(frozen=True)
class Pointer:
    """An argument of a launch that is an address: its number, and the bytes start..stop-1 of the buffer it is of."""

    number: int
    start: int
    stop: int
    name: str


class Reach:
    """What a launch may touch: by each pointer the buffer that it is of."""

    def __init__(self, pointers: Sequence[Pointer] = (), others: Sequence[Pointer] = ()) -> None:
        """`others` are what a kernel reaches through a pointer of the same number, or finds in memory (number -1)."""
        self.pointers = pointers
        tags = {p.number: tag for tag, p in enumerate(pointers, 1)}
        rows = [(p, tags.get(p.number, 0)) for p in (*pointers, *others)]
        self.spans = Spans([(tagged(p.start, tag), tagged(p.stop, tag), p.name) for p, tag in rows])

    def params(self, node: Kernel) -> bytes:
        """The launch's parameters with tagged pointers."""
        out = bytearray(node.params)
        for tag, pointer in enumerate(self.pointers, 1):
            at = node.function.kernel.params[pointer.number].offset
            struct.pack_into("<Q", out, at, tagged(struct.unpack_from("<Q", out, at)[0], tag))
        return bytes(out)


@dataclass
class Graph:
    """Launches in the order in which they were added."""

    nodes: list[Node] = field(default_factory=list)


@dataclass
class Event:
    """When a stream came to it, in the host's seconds."""

    seconds: float | None = None

    def happen(self) -> None:
        self.seconds = time.perf_counter()


@dataclass
class Statistics:
    """What ran: launches and seconds by kernel."""

    launches: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        self.launches[name] = self.launches.get(name, 0) + 1
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


class State:
    """One emulated GPU. `texts` maps the sha256 of a cubin to its PTX."""

    def __init__(self, device: Device, texts: Mapping[str, str], seed: int, check_order: bool = True) -> None:
        self.device, self.texts = device, texts
        self.memory = Memory(device.memory)
        self.random = random.Random(seed)
        self.handles: dict[int, Any] = {}
        self.group: Sequence[State] = (self,)  # all GPUs of the machine
        self.streams: dict[int, list[Callable[[], object]]] = {0: []}
        self.capturing: dict[int, Graph] = {}  # by stream, where its work goes
        self._doing: dict[int, Iterator[bool]] = {}  # by stream, the launch that has begun
        self._kernel = ""
        self.pinned: dict[int, int] = {}
        self.text = ""  # of the last failure
        self.broken: Failure | None = None  # a GPU does nothing more after a kernel has failed
        self.reach: Mapping[int, Sequence[Reach]] = {}  # by graph, of each launch
        self.unwatched: tuple[int, ...] = ()  # allocations that launches only read
        self.check_order = check_order
        self.statistics = Statistics()
        self._next = 0x10000

    def add(self, thing: Any) -> int:
        """A handle for a thing."""
        self._next += 16
        self.handles[self._next] = thing
        return self._next

    def get(self, handle: int, kind: type[Any]) -> Any:
        """The thing of a handle."""
        found = self.handles.get(handle)
        if not isinstance(found, kind):
            raise Failure(INVALID_HANDLE, f"0x{handle:x} is no {kind.__name__.lower()}")
        return found

    # --- memory

    def alloc(self, nbytes: int) -> int:
        """Device memory."""
        if nbytes == 0:
            raise Failure(INVALID_VALUE, "0 bytes were asked for")
        try:
            return self.memory.alloc(nbytes)
        except OutOfMemory as e:
            raise Failure(OUT_OF_MEMORY, str(e)) from None

    def held(self, address: int, nbytes: int, what: str) -> None:
        """Refuses a range that is not whole within an allocation."""
        if not self.memory.holds(address, nbytes):
            raise Failure(INVALID_VALUE, f"{what} of {nbytes} bytes at 0x{address:x} is not within one allocation")

    # --- modules

    def load(self, data: bytes) -> int:
        """A module from a cubin that is known, for this device."""
        text = self.texts.get(hashlib.sha256(data).hexdigest())
        if text is None:
            raise Failure(INVALID_IMAGE, f"there is no PTX beside a cubin of {len(data)} bytes")
        try:
            image = read_cubin(data)
        except PlancError as e:
            raise Failure(INVALID_IMAGE, str(e)) from None
        have, sm = self.device.sm, image.sm
        runs = have == sm if sm >= 90 else have // 10 == sm // 10 and have >= sm
        if not runs:
            raise Failure(NO_BINARY_FOR_GPU, f"a cubin for sm_{sm} on {self.device.name}, which is sm_{have}")
        kernels = _parsed(text)
        for name, kernel in kernels.items():
            _agree(name, image, kernel)
        return self.add(Module(image, kernels))

    def function(self, module: Module, name: str) -> int:
        """A kernel of a module."""
        if name not in module.kernels:
            raise Failure(NOT_FOUND, f"the cubin has no kernel {name}; it has {', '.join(module.kernels)}")
        return self.add(Function(name, module.image.kernels[name], module.kernels[name]))

    def opt_in(self, function: Function, nbytes: int) -> None:
        """Lets a kernel use more shared memory than others."""
        most = self.device.shared_block - function.resources.static_shared
        if nbytes > most:
            raise Failure(
                INVALID_VALUE,
                f"kernel {function.name}: {nbytes} bytes of shared memory, {self.device.name} gives {most}",
            )
        function.shared_limit = nbytes

    # --- launches

    def node(self, function: Function, grid: Grid, params: Sequence[bytes], deps: tuple[int, ...] = ()) -> Kernel:
        """A launch, checked as the driver checks it."""
        name, resources = function.name, function.resources
        if any(not 1 <= n <= most for n, most in zip(grid.blocks, _GRID, strict=True)):
            raise Failure(INVALID_VALUE, f"kernel {name}: a grid of {grid.blocks}, at most {_GRID}")
        if not 1 <= grid.threads <= 1024 or (resources.threads and grid.threads != resources.threads):
            raise Failure(
                INVALID_VALUE, f"kernel {name}: {grid.threads} threads a block, it was compiled for {resources.threads}"
            )
        if grid.shared > function.shared_limit:
            raise Failure(
                INVALID_VALUE,
                f"kernel {name}: {grid.shared} bytes of shared memory, its limit is {function.shared_limit}",
            )
        buffer = bytearray(function.kernel.param_bytes)
        for place, value in zip(function.kernel.params, params, strict=True):
            buffer[place.offset : place.offset + place.size] = value
        return Kernel(deps, function, grid, bytes(buffer))

    def launch(self, node: Kernel, reach: Reach | None = None) -> Iterator[bool]:
        """Runs a kernel; gives False each time that it waits for another GPU."""
        params, spans = (reach.params(node), reach.spans) if reach else (node.params, None)
        kernel = running(_program(node.function.kernel), node.grid, params, self.memory, spans)
        seconds, waits = 0.0, True
        while waits:
            self._kernel, started = node.function.name, time.perf_counter()
            try:
                waits = next(kernel, _ENDED) is not _ENDED
            except PlancError as e:
                raise Failure(LAUNCH_FAILED, str(e)) from None
            seconds += time.perf_counter() - started
            if waits:
                yield False
        self.statistics.add(node.function.name, seconds)

    def launch_graph(self, handle: int, graph: Graph) -> Iterator[bool]:
        """Runs all launches of a graph in a random order that its edges allow, and checks that they do order them.

        Gives True after each, and False each time that one waits for another GPU.
        """
        deps = [node.deps for node in graph.nodes]
        order = random_order(deps, self.random)
        reach = self.reach.get(handle)
        touched = Touched(self.memory, self.unwatched) if self.check_order else None
        self.memory.watcher = touched
        try:
            for index in order:
                yield from self._run(graph.nodes[index], reach[index] if reach else None)
                if touched:
                    touched.end(index)
                yield True
        finally:
            self.memory.watcher = None
        conflict = touched.conflict(deps) if touched else None
        if conflict is not None:
            raise Failure(LAUNCH_FAILED, self._conflict(graph, *conflict, reach))

    def _run(self, node: Node, reach: Reach | None) -> Iterator[bool]:
        """One node of a graph."""
        if isinstance(node, Kernel):
            yield from self.launch(node, reach)
        elif isinstance(node, Child):
            for index in random_order([inner.deps for inner in node.graph.nodes], self.random):
                yield from self._run(node.graph.nodes[index], None)
        elif isinstance(node, Captured):
            made = node.work()
            if isinstance(made, Iterator):
                yield from made

    def _conflict(self, graph: Graph, a: int, b: int, address: int, reach: Sequence[Reach] | None) -> str:
        names = f"launch {a} ({graph.nodes[a].name}) and launch {b} ({graph.nodes[b].name})"
        pointers = reach[a].pointers if reach else ()
        found = (f"byte {address - p.start} of {p.name}" for p in pointers if p.start <= address < p.stop)
        place = next(found, f"0x{address:x}")
        return f"{names} of a graph touch {place}, one of them writes it, and no dependency orders them"

    # --- streams

    def enqueue(self, stream: int, work: Callable[[], object]) -> None:
        """Work for a stream."""
        if stream not in self.streams:
            raise Failure(INVALID_HANDLE, f"0x{stream:x} is no stream")
        graph = self.capturing.get(stream)
        if graph is None:
            self.streams[stream].append(work)
        else:
            last = len(graph.nodes) - 1
            graph.nodes.append(Captured((last,) if graph.nodes else (), work))

    def synchronize(self, stream: int) -> None:
        """Runs all that was enqueued on a stream, and of other GPUs what comes in between."""
        queue = self.streams.get(stream)
        if queue is None:
            raise Failure(INVALID_HANDLE, f"0x{stream:x} is no stream")
        waiting: set[tuple[int, int]] = set()
        while queue:
            ready = [(n, s) for n, gpu in enumerate(self.group) for s, work in gpu.streams.items() if work]
            ready = [place for place in ready if place not in waiting]
            if not ready:
                raise self._fail(stream, self._stuck())
            number, other = ready[0] if len(ready) == 1 else self.random.choice(ready)
            gpu, written = self.group[number], self._written()
            try:
                went_on = gpu.advance(other)
            except Failure:
                if gpu is self:
                    raise
                continue
            if went_on or self._written() != written:
                waiting.clear()
            if not went_on:
                waiting.add((number, other))

    def _written(self) -> int:
        """Grows when a kernel of any GPU writes."""
        return sum(gpu.memory.stores for gpu in self.group)

    def advance(self, stream: int) -> bool:
        """Does the next thing of a stream; False when it waits for another GPU."""
        queue = self.streams[stream]
        try:
            if stream not in self._doing:
                made = queue[0]()
                if not isinstance(made, Iterator):
                    queue.pop(0)
                    return True
                self._doing[stream] = made
            found = next(self._doing[stream], None)
        except Failure as e:
            raise self._fail(stream, e) from None
        if found is None:
            queue.pop(0)
            del self._doing[stream]
        return found is not False

    def _fail(self, stream: int, failure: Failure) -> Failure:
        """The GPU does no more after this."""
        self.broken = failure
        self.streams[stream].clear()
        if (doing := self._doing.pop(stream, None)) is not None:
            doing.close()  # type: ignore[attr-defined]
        return failure

    def _stuck(self) -> Failure:
        others = [gpu.broken.text for gpu in self.group if gpu.broken is not None]
        why = "; ".join(others) or "no GPU writes it"
        return Failure(LAUNCH_FAILED, f"kernel {self._kernel} waits for ever: {why}")

    def synchronize_all(self) -> None:
        """Runs all that was enqueued."""
        for stream in list(self.streams):
            self.synchronize(stream)


@lru_cache(maxsize=512)
def _parsed(text: str) -> Mapping[str, ptx.Kernel]:
    return ptx.parse(text)


_PROGRAMS: dict[int, tuple[ptx.Kernel, Program]] = {}


def _program(kernel: ptx.Kernel) -> Program:
    """Compiled once a kernel, whoever launches it."""
    if id(kernel) not in _PROGRAMS:
        _PROGRAMS[id(kernel)] = kernel, Program(kernel)
    return _PROGRAMS[id(kernel)][1]


def _agree(name: str, image: Cubin, kernel: ptx.Kernel) -> None:
    """Refuses PTX that is not what a cubin was made of."""
    target = "".join(c for c in kernel.target if c.isdigit())
    resources = image.kernels.get(name)
    if resources is None or target != str(image.sm):
        raise Failure(INVALID_IMAGE, f"the PTX of kernel {name} is for sm_{target}, the cubin has no such kernel")
    sizes, expected = [s for _, s in resources.params], [p.size for p in kernel.params]
    if sizes != expected:
        raise Failure(
            INVALID_IMAGE, f"kernel {name}: parameters of {sizes} bytes in the cubin, of {expected} in the PTX"
        )
    if kernel.threads is not None and kernel.threads != resources.threads:
        raise Failure(
            INVALID_IMAGE, f"kernel {name}: {resources.threads} threads in the cubin, {kernel.threads} in the PTX"
        )


def elf_size(header: bytes, read: Callable[[int, int], bytes]) -> int:
    """Bytes of a cubin in memory, from its ELF header; `read(offset, size)` gives more of it."""
    if header[:4] != b"\x7fELF":
        raise Failure(INVALID_IMAGE, "not a cubin (PTX is not compiled on the device)")
    programs, sections = struct.unpack_from("<QQ", header, 0x20)
    program_size, programs_count, section_size, sections_count = struct.unpack_from("<HHHH", header, 0x36)
    end = max(len(header), programs + program_size * programs_count, sections + section_size * sections_count)
    for n in range(sections_count):
        row = read(sections + n * section_size, section_size)
        kind, offset, size = struct.unpack_from("<I", row, 4)[0], *struct.unpack_from("<QQ", row, 24)
        end = max(end, offset + (0 if kind == 8 else size))
    return int(end)
