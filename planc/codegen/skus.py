"""GPUs by name: in goes `skus.json`, out come what each is made of and what kernels may use of its SM."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

_FILE = Path(__file__).with_name("skus.json")
_WARP = 32
_RESERVED = 1024  # bytes of shared memory that the driver takes of each block
_REGISTERS = 65536  # of an SM, in 32 bits
_REGISTER_UNIT = 256  # registers of a warp come in units of this
_SUBCORES = 4  # quarters of an SM; warps of a block are spread over them


@dataclass(frozen=True)
class SM:
    """A compute capability (90 for 9.0). Sizes in bytes are those of cuda_occupancy.h.

    `shared` is the shared memory of an SM and `shared_block` what one block may opt in to; `threads` and `blocks` are
    the most that are resident. `tensor_core` is how the SASS spells a product of its tensor cores, {} being H for bf16,
    I for i8 and Q for fp8.
    """

    number: int
    shared: int
    shared_block: int
    threads: int
    blocks: int
    fp8: bool
    fp4: bool
    tensor_core: str

    @property
    def name(self) -> str:
        """As compilers spell it: from 9.0 on, code is for exactly one capability, and has an `a`."""
        return f"sm_{self.number}" + ("a" if self.number >= 90 else "")

    def resident(self, threads: int, registers: int, shared: int) -> int:
        """Blocks that fit on one SM, by threads a block, registers a thread and bytes of shared memory a block."""
        warps = -(-threads // _WARP)
        of_warp = -(-registers * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT
        fits = [
            self.blocks,
            self.threads // _WARP // warps,
            _REGISTERS // _SUBCORES // of_warp * _SUBCORES // warps,
            self.shared // _shared_units(shared + _RESERVED),
        ]
        return 0 if shared > self.shared_block or threads > 1024 else min(fits)


def _shared_units(size: int) -> int:
    """Shared memory comes in units of 128 bytes."""
    return -(-size // 128) * 128


_KB = 1024
SMS: Mapping[int, SM] = MappingProxyType(
    {
        sm.number: sm
        for sm in (
            SM(80, 164 * _KB, 163 * _KB, 2048, 32, False, False, "{}MMA"),
            SM(86, 100 * _KB, 99 * _KB, 1536, 16, False, False, "{}MMA"),
            SM(89, 100 * _KB, 99 * _KB, 1536, 24, True, False, "{}MMA"),
            SM(90, 228 * _KB, 227 * _KB, 2048, 32, True, False, "{}GMMA"),
            SM(100, 228 * _KB, 227 * _KB, 2048, 32, True, True, "UTC{}MMA"),
            SM(120, 100 * _KB, 99 * _KB, 1536, 24, True, True, "{}MMA"),
            SM(121, 100 * _KB, 99 * _KB, 1536, 24, True, True, "{}MMA"),
        )
    }
)


@dataclass(frozen=True)
class SKU:
    """A GPU as it is sold. `tflops` are dense rates by dtype; a dtype that is absent has no tensor cores there.

    `sources` says, by the name of the figure, where it is from.
    """

    name: str
    gpu: str
    sm: SM
    sms: int
    memory_gb: float
    bandwidth_gbs: float
    l2_mb: float
    nvlink_gbs: float
    tflops: Mapping[str, float]
    sources: Mapping[str, str]


@lru_cache(maxsize=1)
def skus() -> Mapping[str, SKU]:
    """Every GPU of the table, by name, in the table's order."""
    data = json.loads(_FILE.read_text())
    return MappingProxyType({name: _sku(name, row, data["sources"]) for name, row in data["skus"].items()})


def _sku(name: str, row: dict, known: Mapping[str, str]) -> SKU:  # type: ignore[type-arg]
    rates = {f"tflops.{dtype}": figure for dtype, figure in row["tflops"].items()}
    figures = {k: v for k, v in row.items() if k not in ("gpu", "sm", "tflops")}
    return SKU(
        name=name,
        gpu=row["gpu"],
        sm=SMS[row["sm"]],
        tflops={dtype: value for dtype, (value, _) in row["tflops"].items()},
        sources={k: known[source] for k, (_, source) in (figures | rates).items()},
        **{k: value for k, (value, _) in figures.items()},
    )
