"""The program of a CUDA plan: in go a planned graph, a GPU and limits, out come cubins, PTX and the launch plan."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from planc.codegen.cuda.aot import compile as compile_kernels
from planc.codegen.cuda.lower import Limits, Lowered, buckets, lower
from planc.codegen.cuda.tiles import Tiles
from planc.compiler.ir.graph import Graph
from planc.errors import PlancError
from planc.plans import launches, schema


@dataclass(frozen=True)
class Built:
    """What the manifest says of the code, and the bytes that weights take on the device, alignment included."""

    program: schema.Program
    kernels: tuple[schema.Kernel, ...]
    weight_bytes: int
    tiles: tuple[schema.ProductTile, ...]


Progress = Callable[[int, int, str], None]


def build(
    graph: Graph, tiles: Tiles, limits: Limits, root: Path, *, progress: Progress = lambda done, total, name: None
) -> Built:
    """Writes `kernels/` below `root`: a cubin and a PTX text a kernel, and launches.json.

    `progress(done, total, name)` is called as each kernel is compiled. The bytes depend on the arguments and the
    compilers' versions alone. PlancError names a node that no kernel runs, or the measured tile of a kernel that does
    not compile.
    """
    sm = tiles.gpu.sm.number
    made = lower(graph, sm, limits, buckets(limits), tiles)
    try:
        binaries = compile_kernels(made.kernels, sm, root / "kernels", progress=progress)
    except PlancError as e:
        raise _because_of_its_tile(made, e) from e
    plan = made.with_binaries(binaries)
    launches.save(root, plan)
    program = schema.Program(
        library=launches.LAUNCHES,
        arena_bytes=sum(size for arena, size in plan.arenas.items() if arena not in ("weights", launches.KV)),
        logits_offset=plan.buffer[plan.logits].offset,
        weights=tuple(b.name for b in plan.buffers if b.arena == "weights"),
    )
    counts = made.counts
    kernels = tuple(schema.Kernel(k.name, k.function, f"{k.name}.ptx", counts.get(k.name, 0)) for k in made.kernels)
    return Built(program, kernels, plan.arenas["weights"], tuple(row for row, _ in made.products))


def _because_of_its_tile(made: Lowered, error: PlancError) -> PlancError:
    """The error, with what the tuning file says where that is what made the kernel."""
    found = (row for row, name in made.products if row.measured and name in str(error))
    row = next(found, None)
    if row is None:
        return error
    return PlancError(f"the tuning file's entry for {row.product} in tiles of {row.tile} cannot be used: {error}")
