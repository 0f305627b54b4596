"""The memory that the ranks of a CUDA plan share, one piece on each GPU: in go ranks and addresses, out come its parts.

First a table of where each rank's memory begins; then, of each block of a collective's grid, how often it has met the
others, and how often each of them has met it; then the parts that small messages are sent in. The kernels of `ranks.cu`
read it by these numbers.
"""

import struct
from collections.abc import Sequence

SHARED = "ranks"  # the arena, and the one buffer in it
MOST = 16  # ranks
BLOCKS = 32  # of a collective's grid, at most: few enough to be resident together on every GPU
THREADS = 512  # a block
PART = 4096  # f32 that a block sends in one shot
EPOCHS, FLAGS, STAGING = 512, 1024, 4096  # where the parts begin, in bytes
SUM = "sum_parts"  # what the name of the kernel begins with that adds where NCCL moves
_F32 = 4
# Bytes of a sum that are sent in one shot, by the number of ranks: each sends its part to all, so that more ranks send
# more, and soon more than what a second meeting costs. Where they break even was not measured on planc's kernels.
_ONE_SHOT = ((4, 512 << 10), (MOST, 256 << 10))


def table(rank: int, acts: Sequence[int], shared: Sequence[int]) -> bytes:
    """What a rank's piece begins with: its number, and where each rank's activations and piece begin."""
    places = [[*found, *[0] * (MOST - len(found))] for found in (acts, shared)]
    return struct.pack(f"<{1 + 2 * MOST}Q", rank, *places[0], *places[1])


def nbytes(ranks: int) -> int:
    """Bytes of a piece: two parts of each rank for each block, taken in turn."""
    return STAGING + BLOCKS * 2 * ranks * PART * _F32


def in_one_shot(count: int, ranks: int) -> bool:
    """Whether a sum of `count` f32 is sent to all ranks whole."""
    return count * _F32 <= next(most for upto, most in _ONE_SHOT if ranks <= upto)


def blocks(count: int) -> int:
    """The blocks that move `count` f32: one for every four a thread, up to the most."""
    return max(1, min(BLOCKS, -(-count // (4 * THREADS))))
