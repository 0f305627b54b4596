"""The program of a CUDA plan: in go a planned graph, an SM and limits, out come cubins, PTX and the launch plan."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from planc.codegen.cuda.aot import compile as compile_kernels
from planc.codegen.cuda.lower import Limits, buckets, lower
from planc.compiler.ir.graph import Graph
from planc.plans import launches, schema


@dataclass(frozen=True)
class Built:
    """What the manifest says of the code, and the bytes that weights take on the device, alignment included."""

    program: schema.Program
    kernels: tuple[schema.Kernel, ...]
    weight_bytes: int


Progress = Callable[[int, int, str], None]


def build(
    graph: Graph, sm: int, limits: Limits, root: Path, *, progress: Progress = lambda done, total, name: None
) -> Built:
    """Writes `kernels/` below `root`: a cubin and a PTX text a kernel, and launches.json.

    `progress(done, total, name)` is called as each kernel is compiled. The bytes depend on the arguments and the
    compilers' versions alone. PlancError names a node that no kernel runs.
    """
    made = lower(graph, sm, limits, buckets(limits))
    binaries = compile_kernels(made.kernels, sm, root / "kernels", progress=progress)
    plan = made.with_binaries(binaries)
    launches.save(root, plan)
    program = schema.Program(
        library=launches.LAUNCHES,
        arena_bytes=sum(size for arena, size in plan.arenas.items() if arena not in ("weights", launches.KV)),
        logits_offset=plan.buffer[plan.logits].offset,
        weights=tuple(b.name for b in plan.buffers if b.arena == "weights"),
    )
    counts = made.counts
    kernels = tuple(schema.Kernel(k.name, k.function, f"{k.name}.ptx", counts[k.name]) for k in made.kernels)
    return Built(program, kernels, plan.arenas["weights"])
