"""Code of a target: in goes a planned graph, out come its files below a folder and what the manifest says of them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from planc.codegen import cpu, program
from planc.codegen.cpu_blocking import blockings_for, cut
from planc.codegen.target import Target
from planc.compiler import weights
from planc.compiler.fit import check_fits
from planc.compiler.ir.graph import Graph
from planc.compiler.ir.ops import APPENDS
from planc.compiler.ir.types import Attr
from planc.passes.memory import arena_bytes
from planc.passes.options import Options
from planc.plans import schema

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Generated:
    """The manifest's rows of the code. `weight_bytes` and `constant_bytes` are those of one rank on its device."""

    program: schema.Program
    kernels: tuple[schema.Kernel, ...]
    made_with: dict[str, str]
    weight_bytes: int
    constant_bytes: int
    pages: int  # of all full sequences
    estimates: tuple[schema.Estimate, ...] = ()
    tiles: tuple[schema.ProductTile, ...] = ()
    blockings: tuple[schema.ProductBlocking, ...] = ()

    def memory(self, kv: schema.KVLayout) -> schema.Memory:
        """Bytes by part."""
        return schema.Memory(
            weights=self.weight_bytes,
            constants=self.constant_bytes,
            arena=self.program.arena_bytes,
            kv_token=-(-kv.page_bytes // kv.block_size),
            kv_full=kv.page_bytes * self.pages,
        )


def check_tools(target: Target) -> None:
    """PlancError when what compiles for a target does not start or is not installed, with what to install."""
    if target.kind == "cuda":
        from planc.codegen.cuda.toolchain import toolchain

        toolchain()
    else:
        cpu.compiler()


def generate(graph: Graph, options: Options, root: Path, progress: Progress) -> Generated:
    """Writes `kernels/` below `root`. PlancError when the target's compiler fails or is not installed."""
    return (_cuda if options.target.kind == "cuda" else _cpu)(graph, options, root, progress)


def _cpu(graph: Graph, options: Options, root: Path, progress: Progress) -> Generated:
    blockings = blockings_for(options.target, options.tuning)
    code = program.program(graph, options.target, options.dims, blockings)
    cpu.build(code, root / "kernels", progress=progress)
    made = schema.Program(
        library=f"kernels/{cpu.LIBRARY}",
        arena_bytes=arena_bytes(graph, options.dims),
        logits_offset=code.logits_offset,
        weights=code.weights,
    )
    kernels = tuple(schema.Kernel(k.name, k.op, f"{k.name}.cpp", code.counts[k.name]) for k in code.kernels)
    constant, packed = (weights.total_bytes(found) for found in weights.split(graph))
    pages = options.sequence_pages * options.max_num_seqs
    tools = {"compiler": cpu.compiler().version}
    return Generated(made, kernels, tools, packed, constant, pages, blockings=cut(graph, blockings))


def _cuda(graph: Graph, options: Options, root: Path, progress: Progress) -> Generated:
    from planc.codegen.cuda import program as cuda
    from planc.codegen.cuda.estimate import estimates
    from planc.codegen.cuda.lower import Limits
    from planc.codegen.cuda.tiles import tiles_for
    from planc.codegen.cuda.toolchain import toolchain

    limits = Limits(options.max_num_batched_tokens, options.max_num_seqs, options.sequence_pages)
    size = weights.total_bytes([*graph.weights])
    page = next(int(v.type.shape[1]) for v in graph.inputs if v.name == "kv")
    check_fits(options.target, options, size, arena_bytes(graph, options.dims), page * limits.pages)
    tiles = tiles_for(options.target, options.tuning)
    made = cuda.build(graph, tiles, limits, root, progress=progress)
    constant = weights.total_bytes(weights.split(graph)[0])
    steps = (options.max_num_seqs, options.max_num_batched_tokens, options.max_model_len, options.tp)
    return Generated(
        made.program,
        made.kernels,
        {"triton": toolchain().triton, "nvrtc": toolchain().nvrtc, "ptxas": toolchain().ptxas},
        made.weight_bytes - constant,
        constant,
        limits.pages * limits.seqs,
        tuple(estimates(graph, tiles, *steps)) if options.target.gpu else (),
        made.tiles,
    )


def kv_of(graph: Graph, options: Options) -> schema.KVLayout:
    """The cache layout that the nodes which write to it spell; masks are those of the attention that reads it."""
    appends = [n for n in graph.nodes if n.op in APPENDS]
    masks: dict[Attr, set[tuple[str, int]]] = {}
    for n in graph.nodes:
        if n.op == "paged_attention":
            masks.setdefault(n.attr("layer"), set()).add((str(n.attr("kind")), int(n.attr("window"))))  # type: ignore[arg-type]
    names = ("heads", "k_dim", "v_dim", "k_offset", "v_offset", "k_scale_offset", "v_scale_offset")
    layers = []
    for n in appends:
        readers = masks[n.attr("layer")]
        mask, window = next(iter(readers)) if len(readers) == 1 else ("causal", 0)  # what any of them may look at
        own = {k: int(v) for k, v in n.attrs if k in names}  # type: ignore[arg-type]
        layers.append(schema.KVLayer(window=window, mask=mask, **own))
    page_bytes = next(int(v.type.shape[1]) for v in graph.inputs if v.name == "kv")
    return schema.KVLayout(options.kv_dtype, options.block_size, page_bytes, tuple(layers))
