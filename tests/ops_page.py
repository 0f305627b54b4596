"""`docs/ops.md`: in go the ops of the graph that each op of torch became in the tests, out comes the page."""

from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path

from planc.compiler.ir.ops import OPS, Op
from planc.compiler.lift.table import COMPLEX_RULES, RULES, closed_set

PAGE = Path(__file__).parent.parent / "docs" / "ops.md"
# What only brings operands into place.
_PLACING = frozenset({"reshape", "transpose", "copy", "expand", "cast"})
_CASTS = frozenset({"to", "_to_copy", "copy", "type_as"})
_HEAD = """# Ops

A model is traced into ops of torch (ATen); each becomes a few ops of planc's graph, by what it computes and whatever
model it is in. This page is the closed set: {count} ops of torch. A model whose logits need any other is refused, with
the op, the path of the module that calls it and the line of its code:

```
{example}
```

So is an op of the set where it would mix tokens outside of attention (a sum or a sort over them, one of them taken, a
convolution): a step holds tokens of many sequences. So is an argument that the op's rule does not read, rather than
dropped. Truth values are 1.0 and 0.0, integers have 32 bits, and all arithmetic is in float32.

Made by `UPDATE_DOCS=1 pytest tests/compiler/lift/test_table.py -k page`, which lifts every op in every form that its
rule knows and compares it with torch.

## Ops of torch, and what they become

An op in several forms may become any of those listed. What only brings operands into place ({placing}) is left out
where anything else remains. "none" only names axes anew, or makes a constant.

| op of torch | its overloads | ops of the graph |
|---|---|---|
"""
EXAMPLE = (
    "aten.grid_sampler_2d.default in model.layers.0.mixer (modeling_x.py:120): this op is not in the closed set that "
    "can be lifted (docs/ops.md). This model cannot be compiled yet: run it with transformers, or open an issue with "
    "this message."
)


def page(emitted: Mapping[str, set[str]]) -> str:
    """The page; `emitted` maps names of ATen ops without overload to names of ops of the graph."""
    placing = ", ".join(f"`{op}`" for op in sorted(_PLACING))
    head = _HEAD.format(count=len(closed_set()), example=EXAMPLE, placing=placing)
    return head + "\n".join([*(_row(name, emitted.get(name, set())) for name in closed_set()), *_graph()]) + "\n"


def _row(name: str, emitted: set[str]) -> str:
    kept = emitted - (_PLACING - {"cast"} if name in _CASTS else _PLACING) or emitted
    return f"| `{name}` | {_list(_overloads(name))} | {_list(kept) or 'none'} |"


def _overloads(name: str) -> set[str]:
    parts = (str(op).split(".") for op in (*RULES, *COMPLEX_RULES))
    return {overload for space, own, overload in parts if (space, own) == ("aten", name)}


def _list(names: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _graph() -> Iterator[str]:
    """The ops of the graph, those that look alike together, with what their type rule says of them."""
    yield from ("", "## Ops of the graph", "", "A question mark is at what may be missing.", "")
    yield from ("| ops | attributes | types |", "|---|---|---|")
    for (attrs, says), alike in groupby(OPS.values(), lambda op: (_attributes(op), _types(op))):
        yield f"| {', '.join(f'`{op.name}`' for op in alike)} | {attrs} | {says} |"


def _attributes(op: Op) -> str:
    return ", ".join(f"`{name}`" + ("" if must else "?") for name, must in op.attrs.items())


def _types(op: Op) -> str:
    return " ".join((op.infer.__doc__ or "").split("\n\n")[0].split())
