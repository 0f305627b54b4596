"""The program of a plan: in goes a planned graph, out come its kernels, its launch list and every source file."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from planc.codegen.cpu_blocking import Blockings, constants, product_of
from planc.codegen.kernel import Argument, Kernel, arguments, choose
from planc.codegen.render import kernel_source, render
from planc.codegen.target import Target
from planc.compiler.ir.graph import Graph, Node
from planc.compiler.ir.ops import OPS
from planc.errors import PlancError

_LENGTHS = {"T": "planc::TOKENS", "R": "planc::ROWS", "S": "planc::SEQS"}
_INPUTS = ("kv", "ids", "positions", "slots", "page_table", "query_start", "logit_rows")


@dataclass(frozen=True)
class Launch:
    """One call of a kernel: the C++ text of each buffer and of the length of the token axis."""

    kernel: Kernel
    length: str
    buffers: tuple[str, ...]
    loc: str


@dataclass(frozen=True)
class Program:
    """One step: launches in order, weights in the order of `planc_open`, and where the logits lie in the arena.

    It is the same for each of its `ranks`.
    """

    target: Target
    launches: tuple[Launch, ...]
    weights: tuple[str, ...]
    logits_offset: int
    limits: Mapping[str, int]
    ranks: int = 1
    best: Kernel | None = None  # of the last launch: chooses the best of each row where nothing else is wanted of it

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        """Each kernel once, in order of first use; equal names must mean equal sources."""
        found: dict[str, Kernel] = {}
        for kernel in (launch.kernel for launch in self.launches):
            kept = found.setdefault(kernel.name, kernel)
            same = kept.design == kernel.design or kernel_source(kept) == kernel_source(kernel)
            assert same, f"two kernels are named {kernel.name}; their tags must tell them apart"
        return tuple(found.values())

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """Launches a step by kernel name."""
        return Counter(launch.kernel.name for launch in self.launches)

    @cached_property
    def sources(self) -> Mapping[str, str]:
        """File name -> C++ source: one file a kernel, what chooses tokens, and `step.cpp`."""
        files = {f"{k.name}.cpp": kernel_source(k) for k in self.kernels}
        files |= {f"{self.best.name}.cpp": kernel_source(self.best)} if self.best else {}
        return files | {"choose_rows.cpp": render("choose_rows.cpp.jinja", {}), "step.cpp": self._step()}

    def _step(self) -> str:
        variables = {
            "kernels": [k.name for k in self.kernels],
            "launches": self.launches,
            "num_weights": len(self.weights),
            "max_buffers": max(len(launch.buffers) for launch in self.launches),
            "limits": self.limits,
            "ranks": self.ranks,
            "best": self.best.name if self.best else "",
        }
        return render("step.cpp.jinja", variables)


def program(
    graph: Graph, target: Target, limits: Mapping[str, int], blockings: Blockings = MappingProxyType({})
) -> Program:
    """The program of a graph that the select and memory passes have been over.

    `limits` holds the largest T, S and R of a step, `blockings` how some products are to be cut. PlancError
    names a node that no kernel runs, or a value without an address.
    """
    nodes = [n for n in graph.nodes if not OPS[n.op].view]
    used = {name for n in nodes for name in n.inputs}
    weights = tuple(w.name for w in graph.weights if w.name in used)
    refs = _refs(graph, weights)
    launches = tuple(_launch(n, graph, target, refs, blockings) for n in nodes)
    logits = graph.producers[graph.outputs[0]]
    address = next(v.addr for v in logits.outputs if v.name == graph.outputs[0])
    if address is None:
        raise PlancError(f"%{graph.outputs[0]} has no address; run the memory pass first")
    ranks = next((int(n.attr("ranks")) for n in nodes if OPS[n.op].collective), 1)  # type: ignore[arg-type]
    best = best_of(launches[-1].kernel) if nodes[-1] is logits and ranks == 1 else None
    return Program(target, launches, weights, address, dict(limits), ranks, best)


def best_of(head: Kernel) -> Kernel | None:
    """What chooses the best column of what a linear layer would make."""
    if head.template != "linear.cpp.jinja" or head.design.variables["gated"]:
        return None
    return replace(head, name=f"{head.name}_best", template="linear_best.cpp.jinja")


def _refs(graph: Graph, weights: tuple[str, ...]) -> dict[str, tuple[str, int]]:
    """Value name -> (base, byte offset in it) as C++ text and a number."""
    refs = {v.name: (v.name.upper(), 0) for v in graph.inputs if v.name in _INPUTS}
    refs |= {name: (f"weight({i})", 0) for i, name in enumerate(weights)}
    refs |= {v.name: ("arena", v.addr) for n in graph.nodes for v in n.outputs if v.addr is not None}
    return refs


def _launch(n: Node, graph: Graph, target: Target, refs: Mapping[str, tuple[str, int]], blockings: Blockings) -> Launch:
    types = [graph.types[i] for i in n.inputs]
    product = product_of(n, types)
    kernel = choose(n, types, target, constants(blockings.get(product) if product else None))
    buffers = tuple(_buffer(a, n, refs) for a in arguments(n, types, target))
    buffers += ("planc::group()",) if OPS[n.op].collective else ()
    axis = n.out.type.shape[0] if n.outputs else types[0].shape[0]
    return Launch(kernel, _LENGTHS.get(axis, str(axis)) if isinstance(axis, str) else str(axis), buffers, n.loc)


def _buffer(argument: Argument, n: Node, refs: Mapping[str, tuple[str, int]]) -> str:
    if argument.value not in refs:
        raise PlancError(
            f"{n.op} at {n.loc or 'top level'}: %{argument.value} has no address; known graph inputs are "
            f"{', '.join(_INPUTS)}, everything else needs the memory pass"
        )
    base, offset = refs[argument.value]
    if base == "arena":
        return f"arena({offset + argument.offset})"
    if base.startswith("weight"):
        return base
    return f"{{planc::{base}, {argument.offset}}}"
