"""Kernels of plans for an SM, run in the emulator: in goes a call, out come its buffers as it leaves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from planc.codegen.cuda.aot import compile as compile_kernels
from planc.codegen.cuda.call import Call
from planc.emulator.machine import Grid, run
from planc.emulator.memory import Memory
from planc.emulator.run import program
from planc.plans.launches import Arg, Binary, pack
from tests.codegen.cuda import harness, paged
from tests.kernels.harness import Buffer


class Shipped:
    """Runs calls as their compiled PTX, in the place of the harnesses' interpreter."""

    def __init__(self, arch: int, folder: Path) -> None:
        self.arch, self.folder = arch, folder
        self.binaries: dict[str, Binary] = {}

    def compile(self, calls: Sequence[Call]) -> None:
        """Compiles the kernels of calls, all at once."""
        kernels = [c.kernel for c in calls if c.kernel.name not in self.binaries]
        self.binaries |= {b.name: b for b in compile_kernels(kernels, self.arch, self.folder / "kernels")}

    def text(self, name: str) -> str:
        """PTX of a kernel."""
        return (self.folder / self.binaries[name].ptx).read_text()

    def launch(self, call: Call, buffers: Mapping[str, Buffer]) -> None:
        """One call; each buffer has memory of its own."""
        self.compile([call])
        binary, memory = self.binaries[call.kernel.name], Memory(1 << 30)
        places = {n: memory.put(b.data) for n, b in buffers.items()}
        found = program(self.text(call.kernel.name))
        params = bytearray(found.kernel.param_bytes)
        for place, ref in zip(found.kernel.params, call.args, strict=False):
            held = ref.kind in ("value", "scratch")
            arg = Arg("buffer" if held else ref.kind, ref.value, ref.offset)
            data = pack(arg, places[str(ref.value)] if held else 0)
            params[place.offset : place.offset + place.size] = data
        run(found, Grid(call.grid, binary.threads, binary.shared), bytes(params), memory)
        for n, b in buffers.items():
            b.data[:] = memory.get(places[n], b.data.shape, np.uint8)

    def take_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From here on the harnesses launch kernels here."""
        monkeypatch.setattr(harness, "launch", self.launch)
        monkeypatch.setattr(paged, "launch", self.launch)
