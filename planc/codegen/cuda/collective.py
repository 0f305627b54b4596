"""Collectives of ranks as calls: in goes an all_reduce or all_gather with its types, out come its kernels.

One kernel has all ranks take part, each the same launch on its own GPU; what is gathered then goes to its columns.
"""

from collections.abc import Mapping
from dataclasses import replace

from planc.codegen.cuda.call import (
    Bucket,
    Call,
    Constant,
    Ref,
    TritonKernel,
    cdiv,
    i32,
    kernel,
    pointer,
    scratch,
    value,
)
from planc.compiler.ir.graph import Node
from planc.compiler.ir.types import TensorType
from planc.errors import PlancError
from planc.plans import ranks as shared
from planc.plans.ranks import SHARED

GATHERED = "gathered"  # scratch with the parts of all ranks, one behind the other
_BLOCK = 1024
_PATIENCE = 1 << 26  # looks at a flag, some 20 s: far longer than a rank can be late, so the rank is gone
_SLEEP = 20  # nanoseconds between two looks


def calls(node: Node, types: Mapping[str, TensorType], bucket: Bucket) -> tuple[Call, ...]:
    """The call of all ranks, and behind an all_gather the one that places the ranks' parts.

    PlancError when there are more ranks than the memory that they share has places for.
    """
    ranks, count = int(node.attr("ranks")), elements(node, types, bucket)  # type: ignore[arg-type]
    if ranks > shared.MOST:
        raise PlancError(f"a CUDA plan has at most {shared.MOST} ranks, got {ranks}; build it with a smaller --tp")
    placed = (place(node, types, bucket),) if node.op == "all_gather" else ()
    result = scratch(GATHERED) if placed else value(node.out.name)
    made = Call(
        _kernel(node.op, count, ranks),
        (shared.blocks(count), 1, 1),
        (value(node.inputs[0]), result, Ref("i64", count), value(SHARED)),
        reads=(node.inputs[0],),
        writes=(str(result.value), SHARED),
        scratch=placed[0].scratch if placed else {},
    )
    return (made, *placed)


_SIGNATURE = {"x": "*fp32", "y": "*fp32", "count": "i64", "shared": "*u8"}
_WARPS = shared.THREADS // 32


def sum_of_parts(ranks: int) -> TritonKernel:
    """The kernel that adds what NCCL has moved, for GPUs that cannot reach each other's memory."""
    signature = {"parts": "*fp32", "y": "*fp32", "count": "i64"}
    made = kernel("parts", shared.SUM, signature, {"RANKS": ranks}, num_warps=_WARPS, suffix=".cu")
    return replace(made, constants={**made.constants, "THREADS": shared.THREADS})


def _kernel(op: str, count: int, ranks: int) -> TritonKernel:
    """The kernel of an op that moves `count` elements a rank."""
    shots = {True: "_one_shot", False: "_two_shot"}[shared.in_one_shot(count, ranks)] if op == "all_reduce" else ""
    names = ("MOST", "THREADS", "PART", "EPOCHS", "FLAGS", "STAGING")
    macros = {name: getattr(shared, name) for name in names} | {"PATIENCE": _PATIENCE, "SLEEP": _SLEEP}
    made = kernel("ranks", op + shots, _SIGNATURE, {"RANKS": ranks}, num_warps=_WARPS, suffix=".cu")
    return replace(made, constants={**made.constants, **macros})


def elements(node: Node, types: Mapping[str, TensorType], bucket: Bucket) -> int:
    """How many elements a rank gives to a collective."""
    t = types[node.inputs[0]]
    return bucket.size(t.shape[0]) * t.features


def place(node: Node, types: Mapping[str, TensorType], bucket: Bucket) -> Call:
    """From the gathered parts to the columns of the output. Parts that overlap are equal: their order is no matter."""
    t, out = types[node.inputs[0]], node.out
    count, starts = elements(node, types, bucket), node.attr("starts")
    assert isinstance(starts, tuple)
    signature = {"x_ptr": pointer(t.dtype), "y_ptr": pointer(out.type.dtype), "count": "i32"}
    constants: dict[str, Constant] = {
        "WIDTH": int(t.shape[-1]),
        "TOTAL": int(out.type.shape[-1]),
        "STARTS": starts,
        "BLOCK": _BLOCK,
    }
    return Call(
        kernel("collective", "place", signature, constants),
        (cdiv(count, _BLOCK), len(starts), 1),
        (scratch(GATHERED), value(out.name), i32(count)),
        reads=(GATHERED,),
        writes=(out.name,),
        scratch={GATHERED: len(starts) * count * t.itemsize},
    )
