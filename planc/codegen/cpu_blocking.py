"""How products are cut on a CPU: in go a tuning file and a target, out come the constants that a kernel takes.

What blocking.h says of a product that has no entry is the default. No choice changes a bit of a result.
"""

from collections import Counter
from collections.abc import Mapping

from planc.codegen.kernel import Constant, Types, integer
from planc.codegen.target import Target
from planc.codegen.work import PRODUCTS, first_weight
from planc.compiler.ir.graph import Graph, Node
from planc.compiler.ir.quant import SCHEMES
from planc.errors import UsageError
from planc.plans.schema import ProductBlocking
from planc.plans.tuning import Blocking, CpuEntry, CpuProduct, Tuning

Blockings = Mapping[CpuProduct, Blocking]

_UNIT = 128  # of k: whole groups of every format
# The least and the most of each choice: panels and rows of more would leave every cache, registers hold no more rows.
_BETWEEN: Mapping[str, tuple[int, int]] = {
    "chunk_rows": (1, 4096),
    "panel_from": (1, 4096),
    "panel_k": (_UNIT, 2048),
    "tile_rows": (1, 6),
}
_WORTH: Mapping[str, tuple[int, ...]] = {
    "chunk_rows": (96, 384),
    "panel_from": (8, 24, 64),
    "panel_k": (256, 512, 1024, 2048),
    "tile_rows": (4, 6),
}


def product_of(node: Node, types: Types) -> CpuProduct | None:
    """What tuning files call the product that a node computes; None for a node of another kind."""
    if node.op not in PRODUCTS:
        return None
    weight = types[first_weight(node)]
    *experts, n, k = (int(d) for d in weight.shape)
    return CpuProduct(node.op, str(node.attr("scheme", "")) or weight.dtype, n, k, experts[0] if experts else 0)


def cut(graph: Graph, blockings: Blockings) -> tuple[ProductBlocking, ...]:
    """The rows of the manifest: products of the graph that have an entry, with the launches of each."""
    found = Counter(product_of(n, [graph.types[i] for i in n.inputs]) for n in graph.nodes)
    return tuple(
        ProductBlocking(count, p, blockings[p]) for p, count in found.items() if p is not None and p in blockings
    )


def constants(blocking: Blocking | None) -> tuple[Constant, ...]:
    """Those that a kernel's Config has beside its own."""
    return tuple(integer(name.upper(), value) for name, value in blocking.given.items()) if blocking else ()


def blockings_for(target: Target, tuning: Tuning | None) -> Blockings:
    """What a tuning file says of a CPU's target. UsageError names an entry that may not be used."""
    for entry in tuning.cpu_entries if tuning else ():
        if entry.target == str(target):
            _check(entry)
    return tuning.blockings(str(target)) if tuning else {}


def variants(p: CpuProduct) -> tuple[Blocking, ...]:
    """The defaults, then what is worth measuring: one choice each."""
    found = [Blocking()]
    for name in _BETWEEN:
        found += [Blocking(**{name: value}) for value in _worth(p, name)]
    return tuple(found)


def _worth(p: CpuProduct, name: str) -> tuple[int, ...]:
    """Values of a choice that cut the product in different ways."""
    if name != "panel_k":
        return _WORTH[name]
    parts = {-(-p.k // most): most for most in reversed(_WORTH[name])} if _free_k(p) else {}
    return tuple(sorted(parts.values()))


def _free_k(p: CpuProduct) -> bool:
    """False where the k of a panel are summed on their own: codes with a scale a channel, by rows of floats."""
    row = SCHEMES.get(p.weight)
    return row is None or bool(row.group) or row.codes != "i8" or row.act is not None


def _check(entry: CpuEntry) -> None:
    p = entry.product
    if p.op not in PRODUCTS or p.weight not in (*SCHEMES, "f32", "bf16") or min(p.n, p.k) < 1 or p.experts < 0:
        raise UsageError(f"the tuning file's entry for {p} on {entry.target} names no product; planc tune writes them.")
    for name, value in entry.blocking.given.items():
        why = _wrong(p, name, value)
        if why:
            raise UsageError(f"the tuning file's entry for {entry}: {why}.")


def _wrong(p: CpuProduct, name: str, value: int) -> str | None:
    least, most = _BETWEEN[name]
    if not least <= value <= most:
        return f"{name} must be from {least} to {most}, not {value}"
    if name == "panel_k" and value % _UNIT:
        return f"panel_k must be a multiple of {_UNIT}, not {value}"
    if name == "panel_k" and not _free_k(p):
        return "panel_k of this weight is not free: its k are summed by panels"
    return None
