"""Kernel launches of a CUDA plan as data: in go kernels, buffers and graphs of buckets, out comes a file, and back.

A bucket is a fixed capacity of tokens, sequences and rows; its launches form one graph whose edges are `deps`. The file
has one launch a line, so that two plans can be compared with diff.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from planc.errors import PlancError
from planc.plans.ranks import SHARED
from planc.plans.sampling import RECORD, RECORDS, SAMPLED

LAUNCHES = "kernels/launches.json"
ARENAS = ("weights", "kv", "act", "io", SHARED)  # the last of plans of several ranks alone
INPUTS = ("ids", "positions", "slots", "page_table", "query_start", "logit_rows")  # of a step, all int32; then RECORDS
KV = "kv"  # the one buffer of the arena kv, whose size the executor decides
FORMATS = {"buffer": "<Q", "i32": "<i", "i64": "<q", "f32": "<f"}
_WIDE = 16  # bytes; inputs begin at a multiple, as wide accesses need


@dataclass(frozen=True)
class Binary:
    """A compiled kernel, kernels/<name>.cubin and .ptx: threads a block, dynamic shared bytes, places of parameters.

    `params` are (offset, size) in order; the last `hidden` of them are the compiler's own and get zeros.
    """

    name: str
    entry: str
    threads: int
    shared: int
    params: tuple[tuple[int, int], ...]
    hidden: int

    @property
    def cubin(self) -> str:
        """Path of the machine code in the plan."""
        return f"kernels/{self.name}.cubin"

    @property
    def ptx(self) -> str:
        """Path of the text that the emulator runs."""
        return f"kernels/{self.name}.ptx"


@dataclass(frozen=True)
class Buffer:
    """`nbytes` bytes of an arena from `offset` on."""

    name: str
    arena: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Arg:
    """One kernel argument: `buffer` (value is its name, plus `offset` bytes), or a number of type i32, i64 or f32."""

    kind: str
    value: str | int | float
    offset: int = 0


@dataclass(frozen=True)
class Launch:
    """One kernel on a grid; `deps` are indices of launches before it that must have ended.

    A collective, which all ranks launch, has the arguments: a rank's part, where the result goes (of all_gather: the
    parts one behind the other), the elements of a part, all f32, and the memory that ranks share.
    """

    kernel: str
    grid: tuple[int, int, int]
    args: tuple[Arg, ...]
    deps: tuple[int, ...]


@dataclass(frozen=True)
class StepGraph:
    """All launches of one step of at most `tokens` tokens of `seqs` sequences, with logits of `rows` rows.

    `inputs` are buffers of `io` that lie one behind the other, so that one copy fills them; `input_buffers` makes them.
    """

    tokens: int
    seqs: int
    rows: int
    inputs: tuple[Buffer, ...]
    launches: tuple[Launch, ...]

    @property
    def input_span(self) -> tuple[int, int]:
        """The bytes of `io` from the first input's start to the last one's end."""
        return self.inputs[0].offset, self.inputs[-1].offset + self.inputs[-1].nbytes


@dataclass(frozen=True)
class LaunchPlan:
    """What the executor runs. `sm` is the compute capability (90), `logits` a buffer of f32 [rows, vocab].

    `arenas` holds bytes by name; that of kv is 0 here. A row of the page table has `page_table_stride` entries.
    """

    sm: int
    binaries: tuple[Binary, ...]
    buffers: tuple[Buffer, ...]
    arenas: dict[str, int]
    graphs: tuple[StepGraph, ...]
    logits: str
    page_table_stride: int

    @cached_property
    def binary(self) -> dict[str, Binary]:
        """Kernels by name."""
        return {b.name: b for b in self.binaries}

    @cached_property
    def buffer(self) -> dict[str, Buffer]:
        """Buffers by name."""
        return {b.name: b for b in self.buffers}

    @cached_property
    def names(self) -> frozenset[str]:
        """What an argument may be: a buffer, or an input, which every graph has."""
        return frozenset(self.buffer).union(_input_counts((0, 0, 0), 0, self.samples))

    @property
    def samples(self) -> bool:
        """Whether steps choose tokens."""
        return SAMPLED in self.buffer


def input_buffers(bucket: tuple[int, int, int], stride: int, samples: bool, start: int = 0) -> tuple[Buffer, ...]:
    """The inputs of a step of (tokens, seqs, rows) from byte `start` of `io` on; a row of its page table has `stride`
    entries, and a plan that samples has records.
    """
    found = list[Buffer]()
    for name, count in _input_counts(bucket, stride, samples).items():
        found.append(Buffer(name, "io", start, 4 * count))
        start += -(-4 * count // _WIDE) * _WIDE
    return tuple(found)


def _input_counts(bucket: tuple[int, int, int], stride: int, samples: bool) -> dict[str, int]:
    """Integers by input, in order."""
    tokens, seqs, rows = bucket
    counts = dict(zip(INPUTS, (tokens, tokens, tokens, seqs * stride, seqs + 1, rows), strict=True))
    return counts | ({RECORDS: rows * RECORD} if samples else {})


def pack(arg: Arg, address: int = 0) -> bytes:
    """The bytes of a parameter, little-endian; `address` is that of the argument's buffer."""
    value = address + arg.offset if arg.kind == "buffer" else arg.value
    return struct.pack(FORMATS[arg.kind], value)


def size_of(arg: Arg) -> int:
    """Bytes of the parameter that an argument fills."""
    return struct.calcsize(FORMATS[arg.kind])


def to_json(plan: LaunchPlan) -> str:
    """Canonical text: equal plans give equal bytes."""
    lines = [
        "{",
        f' "sm": {plan.sm},',
        f' "logits": {json.dumps(plan.logits)},',
        f' "page_table_stride": {plan.page_table_stride},',
        f' "arenas": {json.dumps(plan.arenas, sort_keys=True)},',
        f' "binaries": {_rows(_binary(b) for b in plan.binaries)},',
        f' "buffers": {_rows([b.name, b.arena, b.offset, b.nbytes] for b in plan.buffers)},',
        f' "graphs": [{",".join(_graph(g) for g in plan.graphs)}]',
        "}",
    ]
    return "\n".join(lines) + "\n"


def from_json(text: str, where: str = LAUNCHES) -> LaunchPlan:
    """The plan of a text; PlancError when it is malformed or contradicts itself, naming the first thing that does."""
    try:
        plan = _plan(json.loads(text))
    except (ValueError, TypeError, KeyError, IndexError) as e:
        raise PlancError(f"{where} is not a launch plan ({type(e).__name__}: {e}). Build the plan again.") from None
    for wrong in problems(plan):
        raise PlancError(f"{where}: {wrong}. Build the plan again.")
    return plan


def load(root: Path) -> LaunchPlan:
    """The launches of a plan directory; PlancError when there are none or they are malformed."""
    path = root / LAUNCHES
    try:
        return from_json(path.read_text(), str(path))
    except OSError as e:
        raise PlancError(f"{path} cannot be read ({e.strerror}). Build the plan again.") from None


def save(root: Path, plan: LaunchPlan) -> None:
    """Writes the launches into a plan directory. ValueError when the plan contradicts itself."""
    for wrong in problems(plan):
        raise ValueError(wrong)
    path = root / LAUNCHES
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_json(plan))


def problems(plan: LaunchPlan) -> Iterator[str]:
    """What contradicts itself in a plan, one sentence each."""
    if repeated := _repeated(plan.binaries) or _repeated(plan.buffers):
        yield f"{repeated!r} is there twice, expected once"
    for buffer in plan.buffers:
        yield from _buffer_problems(plan, buffer)
    if plan.logits not in plan.buffer:
        yield f"there is no buffer {plan.logits!r}"
    fitting: set[tuple[int, int]] = set()  # arguments, by their id, and sizes that fit: most are in many launches
    for graph in plan.graphs:
        if wrong := next(_input_problems(plan, graph), None):
            yield f"the graph of {graph.tokens} tokens: {wrong}"
            return  # its launches say no more
        for index, launch in enumerate(graph.launches):
            for wrong in _launch_problems(plan, index, launch, fitting):
                yield f"launch {index} of the graph of {graph.tokens} tokens: {wrong}"


def _repeated(things: tuple[Any, ...]) -> str | None:
    seen: set[str] = set()
    for thing in things:
        if thing.name in seen:
            return str(thing.name)
        seen.add(thing.name)
    return None


def _buffer_problems(plan: LaunchPlan, buffer: Buffer) -> Iterator[str]:
    if buffer.arena not in ARENAS:
        yield f"buffer {buffer.name!r} lies in {buffer.arena!r}, expected one of {', '.join(ARENAS)}"
    elif buffer.arena != "kv" and not 0 <= buffer.offset <= plan.arenas.get(buffer.arena, 0) - buffer.nbytes:
        yield (
            f"buffer {buffer.name!r} takes bytes {buffer.offset} to {buffer.offset + buffer.nbytes} of the arena "
            f"{buffer.arena!r}, which has {plan.arenas.get(buffer.arena, 0)}"
        )


def _input_problems(plan: LaunchPlan, graph: StepGraph) -> Iterator[str]:
    """What is wrong with the inputs of a graph: those that all graphs have, in their order, of the graph's size."""
    sizes = (graph.tokens, graph.seqs, graph.rows)
    counts = _input_counts(sizes, plan.page_table_stride, plan.samples)
    if [b.name for b in graph.inputs] != list(counts):
        yield f"its inputs are {', '.join(b.name for b in graph.inputs)}, expected {', '.join(counts)}"
        return
    end = 0
    for buffer in graph.inputs:
        if buffer.name in plan.buffer:
            yield f"{buffer.name!r} is there twice, as an input and as a buffer, expected once"
        yield from _buffer_problems(plan, buffer)
        if buffer.nbytes != 4 * counts[buffer.name]:
            yield f"input {buffer.name!r} has {buffer.nbytes} bytes, expected {4 * counts[buffer.name]}"
        if buffer.offset < end or buffer.offset % _WIDE:
            yield f"input {buffer.name!r} begins at byte {buffer.offset}, expected a multiple of {_WIDE} from {end} on"
        end = buffer.offset + buffer.nbytes


def _launch_problems(plan: LaunchPlan, index: int, launch: Launch, fitting: set[tuple[int, int]]) -> Iterator[str]:
    if not all(isinstance(d, int) and 0 <= d < index for d in launch.deps):
        yield f"{launch.kernel} depends on {list(launch.deps)}, expected launches before it"
    binary = plan.binary.get(launch.kernel)
    if binary is None:
        yield f"there is no kernel {launch.kernel!r}"
        return
    if len(launch.grid) != 3 or min(launch.grid) < 1:
        yield f"{launch.kernel} has the grid {list(launch.grid)}, expected three numbers of at least 1"
    expected = len(binary.params) - binary.hidden
    if len(launch.args) != expected:
        yield f"{launch.kernel} has {len(launch.args)} arguments, expected {expected}"
        return
    for number, (arg, (_, size)) in enumerate(zip(launch.args, binary.params, strict=False)):
        if (id(arg), size) in fitting:
            continue
        if arg.kind not in FORMATS or size_of(arg) != size:
            yield f"argument {number} of {launch.kernel} is {arg.kind!r}, expected one of {size} bytes"
        elif arg.kind == "buffer" and arg.value not in plan.names:
            yield f"argument {number} of {launch.kernel}: there is no buffer {arg.value!r}"
        else:
            fitting.add((id(arg), size))


def _binary(b: Binary) -> list[Any]:
    return [b.name, b.entry, b.threads, b.shared, b.params, b.hidden]


def _graph(g: StepGraph) -> str:
    inputs = json.dumps([[b.name, b.offset, b.nbytes] for b in g.inputs])
    head = f'\n  {{"tokens": {g.tokens}, "seqs": {g.seqs}, "rows": {g.rows}, "inputs": {inputs},\n   "launches": '
    return head + _rows(_launch(launch) for launch in g.launches) + "}"


def _launch(launch: Launch) -> list[Any]:
    args = [[a.kind, a.value, a.offset] if a.offset else [a.kind, a.value] for a in launch.args]
    return [launch.kernel, launch.grid, args, launch.deps]


def _rows(rows: Iterator[Any]) -> str:
    return "[" + ",".join("\n   " + json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows) + "]"


def _plan(data: dict[str, Any]) -> LaunchPlan:
    known: dict[tuple[Any, ...], Arg] = {}
    return LaunchPlan(
        sm=int(data["sm"]),
        binaries=tuple(Binary(n, e, t, s, tuple((o, z) for o, z in p), h) for n, e, t, s, p, h in data["binaries"]),
        buffers=tuple(Buffer(*row) for row in data["buffers"]),
        arenas={str(k): int(v) for k, v in data["arenas"].items()},
        graphs=tuple(_read_graph(g, known) for g in data["graphs"]),
        logits=str(data["logits"]),
        page_table_stride=int(data["page_table_stride"]),
    )


def _read_graph(data: dict[str, Any], known: dict[tuple[Any, ...], Arg]) -> StepGraph:
    launches = tuple(
        Launch(kernel, tuple(grid), tuple(_read_arg(a, known) for a in args), tuple(deps))
        for kernel, grid, args, deps in data["launches"]
    )
    inputs = tuple(Buffer(name, "io", int(offset), int(nbytes)) for name, offset, nbytes in data["inputs"])
    return StepGraph(int(data["tokens"]), int(data["seqs"]), int(data["rows"]), inputs, launches)


def _read_arg(row: list[Any], known: dict[tuple[Any, ...], Arg]) -> Arg:
    """Plans of many layers repeat their arguments, so equal ones are made once."""
    key = (*row, type(row[1]))  # 2 is not 2.0
    found = known.get(key)
    if found is None:
        value = float(row[1]) if row[0] == "f32" else row[1]
        found = known[key] = Arg(str(row[0]), value, *row[2:])
    return found
