"""One GPU through cuda.bindings: in go calls of the driver API, out come their results, or errors that name them."""

from __future__ import annotations

import ctypes
import importlib
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planc.errors import PlancError

_LIBRARY = "libcuda.so.1"


class DriverError(PlancError):
    """A call of the driver that failed; `code` is its name, such as CUDA_ERROR_OUT_OF_MEMORY."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class Driver:
    """The driver API. PlancError when this machine has no driver, or cuda.bindings is not installed."""

    def __init__(self) -> None:
        try:
            ctypes.CDLL(_LIBRARY)  # cuda.bindings would search longer, and say less
        except OSError as e:
            raise PlancError(
                f"no NVIDIA driver: {_LIBRARY} cannot be loaded ({e}). Install the driver, run the plan on a machine "
                "with a GPU, or build one with --target cpu; planc verify --emulate checks a CUDA plan without a GPU."
            ) from None
        try:
            self.api = importlib.import_module("cuda.bindings.driver")
        except ImportError as e:
            raise PlancError(f"a CUDA plan needs cuda.bindings ({e}); pip install 'planc[cuda]'") from None

    def start(self, target: str) -> int:
        """Starts the driver for a plan's target; how many GPUs it has."""
        try:
            self.run("starting the driver", "cuInit", 0)
        except DriverError as e:
            raise PlancError(f"the plan is for {target}, but {e}; nvidia-smi says more about this machine") from None
        return int(self.run("counting GPUs", "cuDeviceGetCount"))

    def run(self, doing: str, name: str, *args: Any) -> Any:
        """The result of a call; DriverError names what was being done and what the driver says."""
        code, *results = getattr(self.api, name)(*args)
        if int(code):
            raise DriverError(f"{doing} failed: {self._says(code)}", code.name)
        return results[0] if len(results) == 1 else results or None

    def _says(self, code: Any) -> str:
        wrong, text = self.api.cuGetErrorString(code)
        return code.name if int(wrong) or not text else f"{code.name} ({text.decode(errors='replace')})"


class Gpu:
    """A GPU that runs code for `sm`, its primary context current in this thread, and a stream. Close it in the end."""

    def __init__(self, driver: Driver, sm: int, target: str, device: int = 0) -> None:
        self.api, self.run = driver.api, driver.run
        self._held: list[tuple[str, Any]] = []  # what close gives back, with the call that does
        self.device = self._device(device, driver.start(target))
        self.name = self.run("asking for the GPU's name", "cuDeviceGetName", 256, self.device)
        self.name = self.name.partition(b"\0")[0].decode(errors="replace")
        self._check(sm, target)
        self.context = self.run(f"opening {self.name}", "cuDevicePrimaryCtxRetain", self.device)
        self._held.append(("cuDevicePrimaryCtxRelease", self.device))
        self.enter()
        self.stream = self.run("making a stream", "cuStreamCreate", 1)  # does not wait for the default stream
        self._held.append(("cuStreamDestroy", self.stream))

    def _device(self, ordinal: int, count: int) -> Any:
        if ordinal >= count:
            raise PlancError(f"GPU {ordinal} was asked for, this machine has {count}; see CUDA_VISIBLE_DEVICES")
        return self.run(f"finding GPU {ordinal}", "cuDeviceGet", ordinal)

    def _attribute(self, name: str) -> int:
        attribute = getattr(self.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.run(f"asking for {name}", "cuDeviceGetAttribute", attribute, self.device))

    def _check(self, sm: int, target: str) -> None:
        """Code for 9.0 and later runs on exactly its own capability, older code on later minor ones too."""
        major, minor = (self._attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
        runs = (major, minor) == divmod(sm, 10) if sm >= 90 else major == sm // 10 and minor >= sm % 10
        if not runs:
            raise PlancError(
                f"the plan is for {target} (sm_{sm}), this GPU is {self.name} (sm_{major}{minor}). "
                f"Build one for it with --target sm_{major}{minor}{'a' if major >= 9 else ''}."
            )

    def enter(self) -> None:
        """Makes this GPU the current one of the calling thread."""
        self.run(f"opening {self.name}", "cuCtxSetCurrent", self.context)

    def reaches(self, other: Gpu) -> bool:
        """Whether code that runs here can read and write the other's memory."""
        doing = f"asking whether {self.name} reaches the memory of GPU {int(other.device)}"
        return bool(self.run(doing, "cuDeviceCanAccessPeer", self.device, other.device))

    def reach(self, other: Gpu) -> None:
        """Lets code that runs here read and write the other's memory."""
        self.enter()
        try:
            self.run(f"reaching the memory of GPU {int(other.device)}", "cuCtxEnablePeerAccess", other.context, 0)
        except DriverError as e:
            if e.code != "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED":
                raise

    def memory(self) -> tuple[int, int]:
        """Free and total bytes."""
        free, total = self.run("asking for free memory", "cuMemGetInfo")
        return int(free), int(total)

    def allocate(self, nbytes: int, what: str, advice: str) -> int:
        """The address of device memory. PlancError says what was asked for, what is free, and what to change."""
        try:
            address = self.run(f"allocating {nbytes} bytes for {what}", "cuMemAlloc", nbytes)
        except DriverError as e:
            if e.code != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
            free, total = self.memory()
            raise PlancError(
                f"{nbytes} bytes for {what} do not fit into the memory of {self.name}: {free} of {total} bytes are "
                f"free; {advice}"
            ) from None
        self._held.append(("cuMemFree", address))
        return int(address)

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Host memory that copies to the GPU need not stage; it outlives the GPU when others still look at it."""
        memory = np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8)
        address = int(memory.ctypes.data)
        self.run(f"pinning {nbytes} bytes", "cuMemHostRegister", address, memory.nbytes, 0)
        self._held.append(("cuMemHostUnregister", address))
        return memory[:nbytes]

    def function(self, doing: str, image: bytes, entry: str) -> Any:
        """A kernel of a cubin."""
        module = self.run(doing, "cuModuleLoadData", image)
        self._held.append(("cuModuleUnload", module))
        return self.run(doing, "cuModuleGetFunction", module, entry.encode())

    def graph(self) -> Any:
        """An empty graph."""
        handle = self.run("making a graph", "cuGraphCreate", 0)
        self._held.append(("cuGraphDestroy", handle))
        return handle

    def capture(self) -> None:
        """Has what is enqueued next go to a graph."""
        self.enter()
        mode = self.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED  # NCCL may allocate meanwhile
        self.run("capturing a graph", "cuStreamBeginCapture", self.stream, mode)

    def captured(self) -> Any:
        """The graph of what was enqueued."""
        self.enter()
        handle = self.run("capturing a graph", "cuStreamEndCapture", self.stream)
        self._held.append(("cuGraphDestroy", handle))
        return handle

    def instantiate(self, what: str, graph: Any) -> Any:
        """A graph that can be launched."""
        handle = self.run(f"instantiating {what}", "cuGraphInstantiate", graph, 0)
        self._held.append(("cuGraphExecDestroy", handle))
        return handle

    def copy_in(self, doing: str, to: int, source: NDArray[Any]) -> None:
        """Enqueues a copy from a pinned array to the GPU, which reads it when it comes to it."""
        self.run(doing, "cuMemcpyHtoDAsync", to, int(source.ctypes.data), source.nbytes, self.stream)

    def copy_out(self, doing: str, to: NDArray[Any], source: int) -> None:
        """Enqueues a copy from the GPU to a pinned array."""
        self.run(doing, "cuMemcpyDtoHAsync", int(to.ctypes.data), source, to.nbytes, self.stream)

    def synchronize(self, doing: str) -> None:
        """Waits for the stream."""
        self.run(doing, "cuStreamSynchronize", self.stream)

    def close(self, only: str = "") -> None:
        """Gives everything back, the last first, or what a function of such a name does. A GPU that has failed refuses;
        its memory goes with the process.
        """
        if self._held:
            self.api.cuCtxSetCurrent(self.context)
        ending = [held for held in self._held if held[0].startswith(only)]
        self._held = [held for held in self._held if not held[0].startswith(only)]
        for name, handle in reversed(ending):
            getattr(self.api, name)(handle)
