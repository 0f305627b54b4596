"""Calls around collectives: in goes an all_gather with its types, out come the kernels that place the ranks' parts."""

from collections.abc import Mapping

from planc.codegen.cuda.call import Bucket, Call, cdiv, i32, kernel, pointer, scratch, value
from planc.compiler.ir.graph import Node
from planc.compiler.ir.types import TensorType

GATHERED = "gathered"  # scratch with the parts of all ranks, one behind the other, as NCCL gathers them
_BLOCK = 1024


def elements(node: Node, types: Mapping[str, TensorType], bucket: Bucket) -> int:
    """How many elements a rank gives to a collective."""
    t = types[node.inputs[0]]
    return bucket.size(t.shape[0]) * t.features


def places(node: Node, types: Mapping[str, TensorType], bucket: Bucket) -> tuple[Call, ...]:
    """A call for each rank's part: from the gathered parts to its columns of the output. Parts that overlap are equal,
    so their order is no matter.
    """
    t, out = types[node.inputs[0]], node.out
    count, width, total = elements(node, types, bucket), int(t.shape[-1]), int(out.type.shape[-1])
    starts = node.attr("starts")
    assert isinstance(starts, tuple)
    made = []
    for rank, start in enumerate(starts):
        signature = {"x_ptr": pointer(t.dtype), "y_ptr": pointer(out.type.dtype), "count": "i32"}
        constants = {"WIDTH": width, "TOTAL": total, "START": start, "BLOCK": _BLOCK}
        args = (scratch(GATHERED, rank * count * t.itemsize), value(out.name), i32(count))
        made.append(
            Call(
                kernel("collective", "place", signature, constants),
                (cdiv(count, _BLOCK), 1, 1),
                args,
                reads=(GATHERED,),
                writes=(out.name,),
                scratch={GATHERED: len(starts) * count * t.itemsize},
            )
        )
    return tuple(made)
