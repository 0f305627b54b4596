"""Does a plan fit its GPU? In go bytes by part and the GPU, out comes nothing, or an error with what would fit."""

from planc.codegen.target import Target
from planc.compiler.ir.quant import SCHEMES
from planc.errors import PlancError
from planc.passes.options import Options

USABLE = 0.9  # of a GPU's memory, as --memory-utilization has it: the driver and its context take some
_TRIED = ("fp8", "int8", "awq")
_RANKS = (1, 2, 4, 8)


def check_fits(target: Target, options: Options, weights: int, arena: int, sequence: int) -> None:
    """PlancError when weights, activations and the cache of one full sequence, all in bytes of one rank, are more than
    the GPU's memory; nothing where no GPU is named.
    """
    if target.gpu is None:
        return
    have = int(target.gpu.memory_gb * 1e9 * USABLE)
    need = weights + arena + sequence
    if need <= have:
        return
    advice = _advice(options, weights, arena, sequence, have)
    raise PlancError(
        f"{options.dtype} with --tp {options.tp} does not fit {target.sku}: weights {_gb(weights)}, activations "
        f"{_gb(arena)} and the cache of one sequence of {options.max_model_len:,} tokens {_gb(sequence)} are "
        f"{_gb(need - have)} more than the {_gb(have)} that may be used; {advice}"
    )


def _advice(options: Options, weights: int, arena: int, sequence: int, have: int) -> str:
    """Fewest ranks at the same dtype, and a smaller dtype at the ranks that were asked for."""

    def fits(bits: float, ranks: int) -> bool:
        part = options.tp / ranks
        return weights * bits / _bits(options.dtype) * part + arena + sequence * part <= have

    ranks = next((n for n in _RANKS if n > options.tp and fits(_bits(options.dtype), n)), None)
    dtype = next((d for d in _TRIED if _bits(d) < _bits(options.dtype) and fits(_bits(d), options.tp)), None)
    found = [f"--tp {ranks}" if ranks else "", f"--dtype {dtype}" if dtype else ""]
    if weights + arena < have:
        found.append("a smaller --max-model-len")
    told = " or ".join(filter(None, found))
    return f"{told} would fit" if told else "take a GPU with more memory, and --tp and --dtype together"


def _bits(dtype: str) -> float:
    """Bits of a parameter, scales and zero points included."""
    if dtype not in SCHEMES:
        return 32 if dtype == "f32" else 16
    row = SCHEMES[dtype]
    group = row.group or 1 << 12
    scales = 16 if row.scales == "bf16" else 32
    return (4 if row.codes == "u4" else 8) + scales * len(row.parts[1:]) / group


def _gb(n: int) -> str:
    return f"{n / 1e9:,.1f} GB"
