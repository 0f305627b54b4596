"""Blocks of PTX to Python functions: in goes a basic block, out comes a function over numpy arrays of all its lanes.

A register is an array with one element a lane, or with one element when all lanes agree. A function is made twice, for
all lanes and for some of them (`mask`); the second merges only those results that live longer than the block.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from planc.emulator import arithmetic, bits, convert, floats, flow, memory_ops, tensor_memory_ops, tensor_ops, warp_ops
from planc.emulator.emit import Code, Refused, numpy_type, special
from planc.emulator.flow import Block, Flow
from planc.emulator.ptx import Instruction, Kernel
from planc.errors import PlancError

Run = Callable[..., Any]  # (machine, registers, mask) -> the branch's condition, or None
RULES: dict[str, Callable[[Code, Instruction], None]] = {
    **arithmetic.RULES,
    **convert.RULES,
    **memory_ops.RULES,
    **warp_ops.RULES,
    **tensor_ops.RULES,
    **tensor_memory_ops.RULES,
}
_KINDS = ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64", "f16", "f32", "f64")
_NAME = re.compile(r"\bv\d+\b")


@dataclass
class Function:
    """A compiled block, its source lines and the instruction that each belongs to."""

    run: Run
    lines: list[str]
    origin: list[int]


class Program:
    """A kernel that is ready to run. PlancError names the first instruction that is not emulated."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.flow: Flow = flow.flow(kernel)
        self._made: dict[tuple[int, bool], Function] = {}
        for number in range(len(self.flow.blocks)):
            self.function(number, False)

    def function(self, block: int, masked: bool) -> Function:
        """The function of a block, for all lanes or for those of a mask."""
        key = (block, masked)
        if key not in self._made:
            self._made[key] = _compile(self.kernel, self.flow, self.flow.blocks[block], masked)
        return self._made[key]


def _compile(kernel: Kernel, flow: Flow, block: Block, masked: bool) -> Function:
    code = Code(kernel, flow.across, masked)
    result = "None"
    for index in range(block.start, block.stop):
        instruction = kernel.code[index]
        code.begin(index, instruction)
        if instruction.name in ("bra", "ret", "exit", "trap"):
            result = code.branch(instruction)
        else:
            _emit(code, kernel, instruction)
    code.finish(block.writes_out)
    code.line(f"return {result}")
    _release(code.lines)
    return _build(kernel, block, code)


def _emit(code: Code, kernel: Kernel, instruction: Instruction) -> None:
    rule = RULES.get(instruction.name)
    try:
        if rule is None:
            raise Refused(instruction.name)
        rule(code, instruction)
    except Refused as e:
        raise PlancError(f"{kernel.name}: the PTX instruction {instruction.text!r} is not emulated ({e})") from None


def _release(lines: list[str]) -> None:
    """Frees each array behind its last use, so that the allocator hands the same, cached memory out again."""
    last: dict[str, int] = {}
    for number, line in enumerate(lines):
        for name in _NAME.findall(line):
            last[name] = number
    for name, number in last.items():
        if not lines[number].startswith("return"):
            lines[number] += f"; del {name}"


def _build(kernel: Kernel, block: Block, code: Code) -> Function:
    source = "def run(m, r, mask):\n" + "".join(f"    {line}\n" for line in code.lines)
    namespace: dict[str, Any] = {
        "np": np,
        "bits": bits,
        "floats": floats,
        "where": np.where,
        "special": special,
        **code.constants,
    }
    namespace |= {kind: numpy_type(kind) for kind in _KINDS}
    exec(compile(source, f"<{kernel.name} block at {block.start}>", "exec"), namespace)
    return Function(namespace["run"], code.lines, code.origin)
