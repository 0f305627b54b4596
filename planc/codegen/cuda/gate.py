"""The static gate: in go a kernel, its cubin and the counts of its instructions, out comes why it may not ship.

What is checked needs no GPU, and a GPU would say it late or not at all: code of another SM, more shared memory than a
block may have, a block that no SM has room for, other parameters than a launch passes, sums that left the registers,
and products that do not run on the tensor cores they were written for.
"""

import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from planc.codegen.cuda.call import TritonKernel
from planc.codegen.cuda.cubin import Cubin, Resources
from planc.codegen.skus import SM
from planc.errors import PlancError
from planc.plans.launches import Binary

_OPCODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)
_KEPT = re.compile(r".*MMA$|STL|LDL")  # tensor cores, and memory that a thread spills to
_SIZES = {"i1": 1, "i8": 1, "u8": 1, "i16": 2, "i32": 4, "u32": 4, "fp32": 4, "i64": 8, "u64": 8, "fp64": 8}
_WARP = 32

# Functions that multiply -> the argument whose elements say what is multiplied.
_PRODUCTS = {
    "linear": "w_ptr",
    "linear_codes": "w_ptr",
    "linear_widened": "w_ptr",
    "attend": "k_ptr",
    "attend_split": "k_ptr",
}
_CHOICES = ("scan", "weigh", "draw")  # functions that keep tiles of a vocabulary in registers
_LETTERS = {"*bf16": "H", "*i8": "I", "*fp8e4nv": "Q"}  # how instructions spell what they multiply
_WIDENED = ("linear_widened", "attend", "attend_split")  # codes become bf16 there
# Bytes a thread may keep in memory: `attend` puts the sums of earlier splits there while it walks the next, outside of
# its loop over keys. All else that multiplies or chooses has its sums in registers; for the sake of one block more on
# an SM, the assembler may park a word or two across the loop, stored before it and loaded after it.
_STACK = {"attend": 512, "attend_split": 64}
_PARKED = 16


def instructions(cubin: Path, disassembler: Path) -> dict[str, int]:
    """How often each instruction of the tensor cores and of local memory is in a cubin. PlancError when it fails."""
    done = subprocess.run([disassembler, "-c", cubin], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PlancError(f"{disassembler.name} cannot read it: {' '.join(done.stderr.split())[:300]}")
    found = Counter(_OPCODE.findall(done.stdout))
    return {name: count for name, count in sorted(found.items()) if _KEPT.fullmatch(name)}


def check(kernel: TritonKernel, binary: Binary, cubin: Cubin, counts: Mapping[str, int], sm: SM) -> None:
    """PlancError says everything that is wrong with a kernel; that is a defect of planc, so it names the numbers."""
    wrong = [*_fits(binary, cubin, sm), *_parameters(kernel, binary), *_spills(kernel, binary, cubin, counts)]
    wrong += _products(kernel, binary, cubin, counts, sm)
    if wrong:
        raise PlancError(f"kernel {kernel.name} fails the gate for {sm.name}: {'; '.join(wrong)}")


def _fits(binary: Binary, cubin: Cubin, sm: SM) -> Iterator[str]:
    found = cubin.kernels[binary.entry]
    shared = binary.shared + found.static_shared
    if cubin.sm != sm.number:
        yield f"it is code for SM {cubin.sm}"
    if shared > sm.shared_block:
        yield f"it takes {shared} B of shared memory, and a block may have {sm.shared_block}"
    elif not sm.resident(found.threads, found.registers, shared):
        yield f"no SM has room for a block of {found.threads} threads with {found.registers} registers each"


def _parameters(kernel: TritonKernel, binary: Binary) -> Iterator[str]:
    wanted = [8 if kind.startswith("*") else _SIZES[kind] for kind in kernel.signature.values()]
    wanted += [8] * binary.hidden
    found = [size for _, size in binary.params]
    if found != wanted:
        yield f"its parameters take {found} B, expected {wanted}"
    if binary.threads < kernel.num_warps * _WARP or binary.threads % _WARP:
        yield f"it has {binary.threads} threads, expected {kernel.num_warps} warps"


def _spills(kernel: TritonKernel, binary: Binary, cubin: Cubin, counts: Mapping[str, int]) -> Iterator[str]:
    stack = _spilled(cubin.kernels[binary.entry], counts)
    allowed = _STACK.get(kernel.function, _PARKED)
    checked = kernel.suffix == ".cu" or kernel.function in (*_PRODUCTS, *_CHOICES)
    if checked and stack > allowed:
        yield f"it spills {stack} B a thread, {allowed} are allowed"


def _products(kernel: TritonKernel, binary: Binary, cubin: Cubin, counts: Mapping[str, int], sm: SM) -> Iterator[str]:
    if kernel.function not in _PRODUCTS:
        return
    wanted = _instruction(kernel, sm)
    if wanted and not counts.get(wanted):
        have = ", ".join(n for n in counts if n.endswith("MMA")) or "no instructions of tensor cores"
        yield f"it has no {wanted}, but {have}"


def _spilled(found: Resources, counts: Mapping[str, int]) -> int:
    """Bytes of stack, where anything is stored there."""
    return found.stack if counts.get("STL") else 0


def _instruction(kernel: TritonKernel, sm: SM) -> str | None:
    """What a product must compile to; None for f32, which has no tensor cores of its own."""
    kind = kernel.signature[_PRODUCTS[kernel.function]]
    letter = "H" if kernel.function in _WIDENED and kind != "*fp32" else _LETTERS.get(kind)
    return sm.tensor_core.format(letter) if letter else None
