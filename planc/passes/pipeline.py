"""The ordered list of passes: in goes a lifted graph, out comes a planned one and a log of every pass.

After each pass the graph is verified (types inferred again, text round trip), and what the pass had to match must be
gone: a miss is an error that names it, unless a slower form of the same runs too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from planc.compiler.ir.graph import Graph, Node
from planc.compiler.ir.text import Recipes, to_text
from planc.compiler.ir.verify import verify
from planc.errors import PlancError
from planc.passes import (
    activation,
    assign,
    fold,
    fuse_act,
    fuse_add_norm,
    fuse_append,
    fuse_gate,
    fuse_quantize,
    kv_layout,
    merge_linear,
    norm,
    quantize,
    rotary,
)
from planc.passes.balance import balance
from planc.passes.dedupe import dedupe
from planc.passes.fuse_pointwise import fuse_pointwise
from planc.passes.last_rows import last_rows
from planc.passes.memory import memory
from planc.passes.migrate import migrate
from planc.passes.narrow import narrow
from planc.passes.options import Options
from planc.passes.select import select
from planc.passes.shard import shard
from planc.passes.sparse_experts import sparse_experts
from planc.plans.schema import PassLog

PassFn = Callable[[Graph, Options], tuple[Graph, int]]


@dataclass(frozen=True)
class Pass:
    """`targets` gives the nodes that the pass should match, each one; None where nothing can be said beforehand.

    A miss is an error, unless the pass is `optional`: then the node stays as it is written, and runs slower.
    """

    run: PassFn
    targets: Callable[[Graph], list[Node]] | None = None
    optional: bool = False

    @property
    def name(self) -> str:
        return self.run.__name__


# Shard, then merge, then fuse, then quantize: in this order no scale ever needs splitting.
PIPELINE = (
    Pass(dedupe),
    Pass(fold.fold),
    Pass(sparse_experts),
    Pass(activation.activation),
    Pass(norm.norm, targets=norm.roots, optional=True),
    Pass(rotary.rotary, targets=rotary.ends, optional=True),
    Pass(last_rows),
    Pass(shard),
    Pass(assign.assign, targets=assign.weighted),
    Pass(merge_linear.merge_linear, targets=merge_linear.mergeable),
    Pass(fuse_add_norm.fuse_add_norm, targets=fuse_add_norm.fusable),
    Pass(fuse_act.fuse_act, targets=fuse_act.gated),
    Pass(fuse_pointwise),
    Pass(migrate),
    Pass(quantize.quantize, targets=assign.weighted),
    Pass(balance),
    Pass(kv_layout.kv_layout, targets=kv_layout.attentions),
    Pass(fuse_append.fuse_append),
    Pass(fuse_gate.fuse_gate),
    Pass(fuse_quantize.fuse_quantize),
    Pass(narrow),
    Pass(select),
    Pass(memory),
)


def run(
    graph: Graph,
    options: Options,
    *,
    dump: Path | None = None,
    progress: Callable[[str], None] = lambda name: None,
    pipeline: tuple[Pass, ...] = PIPELINE,
) -> tuple[Graph, tuple[PassLog, ...]]:
    """The graph after every pass, and the log. With `dump`, the text after pass N is written to `dump/NN-name.ir`.

    Raises PlancError when a pass matches less than it must, or leaves a graph that does not verify.
    """
    recipes = Recipes()
    verify(graph, "lift", recipes)
    _dump(dump, 0, "lift", graph)
    log = []
    for i, row in enumerate(pipeline, 1):
        progress(row.name)
        expected = len(row.targets(graph)) if row.targets else None
        before = graph
        graph, matches = row.run(graph, options)
        _dump(dump, i, row.name, graph)
        verify(graph, row.name, recipes)
        _check(row, before, graph, matches, expected)
        log.append(PassLog(row.name, matches, expected, len(graph.nodes)))
    return graph, tuple(log)


def _check(row: Pass, before: Graph, after: Graph, matches: int, expected: int | None) -> None:
    if row.optional or row.targets is None or expected is None or matches >= expected:
        return
    still = {(n.op, n.out.name) for n in after.nodes if n.outputs}
    missed = [n for n in row.targets(before) if (n.op, n.out.name) in still]
    first = missed[0] if missed else row.targets(before)[0]
    reads = ", ".join(f"%{i} from {_origin(i, before)}" for i in first.inputs)
    raise PlancError(
        f"{row.name}: {matches} matches, expected {expected}. First miss: {first.op} %{first.out.name} at "
        f"{first.loc or 'top level'}, which reads {reads}. This form of the model is not understood yet; "
        "--dump-dir writes the graph after each pass."
    )


def _origin(name: str, graph: Graph) -> str:
    made = graph.producers.get(name)
    return f"'{made.op}'" if made else ("a weight" if name in graph.weight_by_name else "an input")


def _dump(folder: Path | None, number: int, name: str, graph: Graph) -> None:
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{number:02d}-{name}.ir").write_text(to_text(graph))
