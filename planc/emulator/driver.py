"""The driver API over an emulated GPU: in go C calls of cuda.bindings, out come the results that a driver would give.

Each function is a row of `_CALLS`: its C argument types and a Python function of the emulated GPU's state. What is not
there the bindings report as missing.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any

from planc.emulator import library
from planc.emulator.device import (
    INVALID_DEVICE,
    INVALID_HANDLE,
    INVALID_IMAGE,
    INVALID_VALUE,
    NO_DEVICE,
    NO_PEERS,
    PEERS_ALREADY,
    UNKNOWN,
    Child,
    Event,
    Failure,
    Function,
    Graph,
    Module,
    Node,
    State,
    elf_size,
)
from planc.emulator.machine import Grid
from planc.emulator.tiles import MAP_BYTES, TensorMap
from planc.errors import PlancError

_VERSION = 13000  # CUDA 13.0, whose driver is the oldest that runs the plan's cubins
_NAMES = {
    1: "CUDA_ERROR_INVALID_VALUE", 2: "CUDA_ERROR_OUT_OF_MEMORY", 100: "CUDA_ERROR_NO_DEVICE",
    101: "CUDA_ERROR_INVALID_DEVICE", 200: "CUDA_ERROR_INVALID_IMAGE", 209: "CUDA_ERROR_NO_BINARY_FOR_GPU",
    217: "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", 704: "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
    400: "CUDA_ERROR_INVALID_HANDLE", 500: "CUDA_ERROR_NOT_FOUND", 719: "CUDA_ERROR_LAUNCH_FAILED", 0: "CUDA_SUCCESS",
}  # fmt: skip
# CUtensorMapDataType -> bytes of an element
_ELEMENT = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2, 10: 4, 11: 4}
_CONTEXT = 0x1000


class _KernelNodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS of CUDA 12 and later."""

    _fields_ = (
        ("func", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("kernel_params", POINTER(c_void_p)),
        ("extra", c_void_p),
        ("kern", c_void_p),
        ("ctx", c_void_p),
    )


_states: Sequence[State] = ()  # the GPUs of this process's driver
_thread = threading.local()  # `current`: the number of the GPU that the thread's calls are for
_lock = threading.RLock()  # as a driver's, calls may come from several threads
_KEPT: dict[str, Any] = {}  # C function pointers by name
_CALLS: dict[str, tuple[tuple[Any, ...], Callable[..., None]]] = {}
_ALWAYS = ("cuGetErrorString", "cuGetErrorName", "cuInit", "cuCtxSetCurrent", "cuGraphExecDestroy")


@contextmanager
def active(*states: State) -> Iterator[None]:
    """Makes these the GPUs of this process's driver."""
    global _states
    library.install(_find)
    if _states:
        raise PlancError("an emulated GPU is in use already; end that one first")
    _states, _thread.current = states, 0
    for state in states:
        state.group = states
    try:
        yield
    finally:
        _states = ()


def _find(name: str) -> int | None:
    if name not in _CALLS:
        return None
    if name not in _KEPT:
        types, function = _CALLS[name]
        _KEPT[name] = ctypes.CFUNCTYPE(c_int, *types)(_called(name, function))
    return ctypes.cast(_KEPT[name], c_void_p).value


def _called(name: str, function: Callable[..., None]) -> Callable[..., int]:
    def call(*args: Any) -> int:
        with _lock:
            return locked(*args)

    def locked(*args: Any) -> int:
        if not _states:
            return NO_DEVICE
        state = _states[getattr(_thread, "current", 0)]
        if state.broken is not None and name not in _ALWAYS:
            return state.broken.code
        try:
            function(state, *args)
        except Failure as e:
            state.text = e.text
            return e.code
        except PlancError as e:
            state.text = str(e)
            return INVALID_IMAGE
        except Exception as e:  # noqa: BLE001 - an exception cannot cross C
            state.text = f"the emulator failed in {name}: {type(e).__name__}: {e}"
            sys.excepthook(*sys.exc_info())
            return UNKNOWN
        return 0

    return call


def _call(name: str, *types: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def add(function: Callable[..., None]) -> Callable[..., None]:
        _CALLS[name] = types, function
        return function

    return add


# --- errors, device, context


@_call("cuGetErrorString", c_int, POINTER(c_char_p))
def _error_string(state: State, code: int, out: Any) -> None:
    text = state.broken.text if state.broken and state.broken.code == code else state.text
    _KEPT["text"] = ctypes.create_string_buffer(text.encode())  # alive until the next one
    out[0] = ctypes.cast(_KEPT["text"], c_char_p)


@_call("cuGetErrorName", c_int, POINTER(c_char_p))
def _error_name(state: State, code: int, out: Any) -> None:
    out[0] = _NAMES.get(code, "CUDA_ERROR_UNKNOWN").encode()


@_call("cuInit", c_uint)
def _init(state: State, flags: int) -> None:
    pass


@_call("cuDriverGetVersion", POINTER(c_int))
def _driver_version(state: State, out: Any) -> None:
    out[0] = _VERSION


@_call("cuDeviceGetCount", POINTER(c_int))
def _device_count(state: State, out: Any) -> None:
    out[0] = len(_states)


@_call("cuDeviceGet", POINTER(c_int), c_int)
def _device_get(state: State, out: Any, ordinal: int) -> None:
    if ordinal >= len(_states):
        raise Failure(INVALID_DEVICE, f"device {ordinal} of {len(_states)}")
    out[0] = ordinal


@_call("cuDeviceGetName", c_void_p, c_int, c_int)
def _device_name(state: State, out: int, size: int, device: int) -> None:
    name = _states[device].device.name.encode()[: size - 1] + b"\0"
    ctypes.memmove(out, name, len(name))


@_call("cuDeviceTotalMem", POINTER(c_size_t), c_int)
def _total_memory(state: State, out: Any, device: int) -> None:
    out[0] = _states[device].device.memory


@_call("cuDeviceGetAttribute", POINTER(c_int), c_int, c_int)
def _attribute(state: State, out: Any, which: int, device: int) -> None:
    d = _states[device].device
    known = {1: 1024, 8: 49152, 10: 32, 16: d.multiprocessors, 75: d.sm // 10, 76: d.sm % 10, 97: d.shared_block}
    if which not in known:
        raise Failure(INVALID_VALUE, f"the emulated GPU has no attribute {which}")
    out[0] = known[which]


@_call("cuDevicePrimaryCtxRetain", POINTER(c_void_p), c_int)
def _retain(state: State, out: Any, device: int) -> None:
    out[0] = _CONTEXT + device


@_call("cuDevicePrimaryCtxRelease", c_int)
def _release(state: State, device: int) -> None:
    _states[device].synchronize_all()


@_call("cuCtxSetCurrent", c_void_p)
def _set_current(state: State, context: int | None) -> None:
    _thread.current = (context or _CONTEXT) - _CONTEXT


@_call("cuCtxGetCurrent", POINTER(c_void_p))
def _get_current(state: State, out: Any) -> None:
    out[0] = _CONTEXT + getattr(_thread, "current", 0)


@_call("cuDeviceCanAccessPeer", POINTER(c_int), c_int, c_int)
def _can_access(state: State, out: Any, device: int, peer: int) -> None:
    out[0] = int(device != peer and _states[device].device.peers and _states[peer].device.peers)


@_call("cuCtxEnablePeerAccess", c_void_p, c_uint)
def _enable_peer(state: State, context: int, flags: int) -> None:
    other = _states[context - _CONTEXT]
    if not (state.device.peers and other.device.peers):
        raise Failure(NO_PEERS, f"{state.device.name} cannot reach {other.device.name}")
    if other is state or other.memory in state.memory.peers:
        raise Failure(PEERS_ALREADY, "the memory is reached already")
    state.memory.peers.append(other.memory)


@_call("cuCtxSynchronize")
def _synchronize_context(state: State) -> None:
    state.synchronize_all()


# --- memory


@_call("cuMemGetInfo", POINTER(c_size_t), POINTER(c_size_t))
def _memory_info(state: State, free: Any, total: Any) -> None:
    free[0], total[0] = state.memory.total - state.memory.used, state.memory.total


@_call("cuMemAlloc", POINTER(c_uint64), c_size_t)
def _alloc(state: State, out: Any, nbytes: int) -> None:
    out[0] = state.alloc(nbytes)


@_call("cuMemFree", c_uint64)
def _free(state: State, address: int) -> None:
    state.synchronize_all()
    if not state.memory.free(address):
        raise Failure(INVALID_VALUE, f"no allocation starts at 0x{address:x}")


@_call("cuMemHostRegister", c_void_p, c_size_t, c_uint)
def _register(state: State, address: int, nbytes: int, flags: int) -> None:
    if address in state.pinned:
        raise Failure(INVALID_VALUE, f"0x{address:x} is registered already")
    state.pinned[address] = nbytes


@_call("cuMemHostUnregister", c_void_p)
def _unregister(state: State, address: int) -> None:
    state.synchronize_all()
    if state.pinned.pop(address, None) is None:
        raise Failure(INVALID_VALUE, f"0x{address:x} is not registered")


def _is_pinned(state: State, address: int, nbytes: int) -> bool:
    return any(start <= address and address + nbytes <= start + size for start, size in state.pinned.items())


@_call("cuMemcpyHtoDAsync", c_uint64, c_void_p, c_size_t, c_void_p)
def _copy_in_async(state: State, to: int, source: int, nbytes: int, stream: int | None) -> None:
    """A copy from pinned memory reads it when the stream comes to it, any other at once."""
    state.held(to, nbytes, "a copy")
    if not _is_pinned(state, source, nbytes):
        state.synchronize(stream or 0)
        ctypes.memmove(to, source, nbytes)
        return
    state.enqueue(stream or 0, lambda: ctypes.memmove(to, source, nbytes))


@_call("cuMemcpyDtoHAsync", c_void_p, c_uint64, c_size_t, c_void_p)
def _copy_out_async(state: State, to: int, source: int, nbytes: int, stream: int | None) -> None:
    state.held(source, nbytes, "a copy")
    state.enqueue(stream or 0, lambda: ctypes.memmove(to, source, nbytes))
    if not _is_pinned(state, to, nbytes):
        state.synchronize(stream or 0)


@_call("cuMemcpyHtoD", c_uint64, c_void_p, c_size_t)
def _copy_in(state: State, to: int, source: int, nbytes: int) -> None:
    state.held(to, nbytes, "a copy")
    state.synchronize_all()
    ctypes.memmove(to, source, nbytes)


@_call("cuMemcpyDtoH", c_void_p, c_uint64, c_size_t)
def _copy_out(state: State, to: int, source: int, nbytes: int) -> None:
    state.held(source, nbytes, "a copy")
    state.synchronize_all()
    ctypes.memmove(to, source, nbytes)


@_call("cuMemsetD8Async", c_uint64, c_ubyte, c_size_t, c_void_p)
def _fill(state: State, to: int, value: int, nbytes: int, stream: int | None) -> None:
    state.held(to, nbytes, "a fill")
    state.enqueue(stream or 0, lambda: ctypes.memset(to, value, nbytes))


# --- streams and events


@_call("cuStreamCreate", POINTER(c_void_p), c_uint)
def _stream(state: State, out: Any, flags: int) -> None:
    handle = state.add("stream")
    state.streams[handle] = []
    out[0] = handle


@_call("cuStreamDestroy", c_void_p)
def _end_stream(state: State, stream: int) -> None:
    state.synchronize(stream)
    del state.streams[stream]


@_call("cuStreamSynchronize", c_void_p)
def _synchronize(state: State, stream: int | None) -> None:
    state.synchronize(stream or 0)


@_call("cuEventCreate", POINTER(c_void_p), c_uint)
def _event(state: State, out: Any, flags: int) -> None:
    out[0] = state.add(Event())


@_call("cuEventRecord", c_void_p, c_void_p)
def _record(state: State, event: int, stream: int | None) -> None:
    state.enqueue(stream or 0, state.get(event, Event).happen)


@_call("cuEventElapsedTime", POINTER(c_float), c_void_p, c_void_p)
def _elapsed(state: State, out: Any, start: int, stop: int) -> None:
    times = [state.get(event, Event).seconds for event in (start, stop)]
    if times[0] is None or times[1] is None:
        raise Failure(INVALID_HANDLE, "an event that no stream has come to yet")
    out[0] = (times[1] - times[0]) * 1e3


@_call("cuEventDestroy", c_void_p)
def _end_event(state: State, event: int) -> None:
    state.get(event, Event)
    del state.handles[event]


@_call("cuStreamBeginCapture", c_void_p, c_int)
def _begin_capture(state: State, stream: int, mode: int) -> None:
    if stream not in state.streams or stream in state.capturing:
        raise Failure(INVALID_VALUE, f"0x{stream:x} is no stream that can begin to be captured")
    state.capturing[stream] = Graph()


@_call("cuStreamEndCapture", c_void_p, POINTER(c_void_p))
def _end_capture(state: State, stream: int, out: Any) -> None:
    graph = state.capturing.pop(stream, None)
    if graph is None:
        raise Failure(INVALID_VALUE, f"0x{stream:x} is not being captured")
    out[0] = state.add(graph)


# --- modules and launches


@_call("cuModuleLoadData", POINTER(c_void_p), c_void_p)
def _load(state: State, out: Any, image: int) -> None:
    size = elf_size(ctypes.string_at(image, 64), lambda offset, n: ctypes.string_at(image + offset, n))
    out[0] = state.load(ctypes.string_at(image, size))


@_call("cuModuleUnload", c_void_p)
def _unload(state: State, module: int) -> None:
    state.get(module, Module)
    del state.handles[module]


@_call("cuModuleGetFunction", POINTER(c_void_p), c_void_p, c_char_p)
def _function(state: State, out: Any, module: int, name: bytes) -> None:
    out[0] = state.function(state.get(module, Module), name.decode())


@_call("cuFuncSetAttribute", c_void_p, c_int, c_int)
def _function_attribute(state: State, function: int, which: int, value: int) -> None:
    if which != 8:  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        raise Failure(INVALID_VALUE, f"attribute {which} of a function")
    state.opt_in(state.get(function, Function), value)


def _values(function: Function, pointers: Any) -> list[bytes]:
    """Each parameter by its own pointer; its size is the kernel's."""
    sizes = [size for _, size in function.resources.params]
    if sizes and not pointers:
        raise Failure(INVALID_VALUE, f"kernel {function.name} has {len(sizes)} parameters, none were given")
    return [ctypes.string_at(pointers[n], size) for n, size in enumerate(sizes)]


def _threads(function: Function, block: tuple[int, int, int]) -> int:
    if block[1] != 1 or block[2] != 1:
        raise Failure(INVALID_VALUE, f"kernel {function.name}: a block of {block}, the emulator runs (n, 1, 1)")
    return block[0]


@_call("cuLaunchKernel", c_void_p, *[c_uint] * 7, c_void_p, POINTER(c_void_p), c_void_p)
def _launch(state: State, function: int, *rest: Any) -> None:
    (x, y, z), block, (shared, stream, params, extra) = rest[:3], rest[3:6], rest[6:]
    kernel = state.get(function, Function)
    if extra:
        raise Failure(INVALID_VALUE, f"kernel {kernel.name}: parameters in one buffer are not emulated")
    node = state.node(kernel, Grid((x, y, z), _threads(kernel, block), shared), _values(kernel, params))
    state.enqueue(stream or 0, lambda: state.launch(node))


@_call("cuGraphCreate", POINTER(c_void_p), c_uint)
def _graph(state: State, out: Any, flags: int) -> None:
    out[0] = state.add(Graph())


@_call("cuGraphAddKernelNode", *[POINTER(c_void_p), c_void_p, POINTER(c_void_p), c_size_t], POINTER(_KernelNodeParams))
def _kernel_node(state: State, out: Any, graph: int, deps: Any, count: int, params: Any) -> None:
    given = params[0]
    kernel, owner = state.get(given.func or 0, Function), state.get(graph, Graph)
    if given.extra:
        raise Failure(INVALID_VALUE, f"kernel {kernel.name}: parameters in one buffer are not emulated")
    before = _before(state, owner, deps, count, f"kernel {kernel.name}")
    grid = Grid(tuple(given.grid), _threads(kernel, tuple(given.block)), given.shared)
    owner.nodes.append(state.node(kernel, grid, _values(kernel, given.kernel_params), before))
    out[0] = state.add(owner.nodes[-1])


def _before(state: State, owner: Graph, deps: Any, count: int, what: str) -> tuple[int, ...]:
    """The places of nodes in their graph."""
    places = []
    for n in range(count):
        node = state.get(deps[n], Node)
        if not any(node is other for other in owner.nodes):
            raise Failure(INVALID_VALUE, f"{what} depends on a node of another graph")
        places.append(next(i for i, other in enumerate(owner.nodes) if other is node))
    return tuple(places)


@_call("cuGraphAddChildGraphNode", *[POINTER(c_void_p), c_void_p, POINTER(c_void_p), c_size_t], c_void_p)
def _child_node(state: State, out: Any, graph: int, deps: Any, count: int, child: int) -> None:
    owner, inner = state.get(graph, Graph), state.get(child, Graph)
    owner.nodes.append(Child(_before(state, owner, deps, count, "a graph"), Graph(list(inner.nodes))))
    out[0] = state.add(owner.nodes[-1])


@_call("cuGraphInstantiateWithFlags", POINTER(c_void_p), c_void_p, c_uint64)
def _instantiate(state: State, out: Any, graph: int, flags: int) -> None:
    out[0] = state.add(Graph(list(state.get(graph, Graph).nodes)))


@_call("cuGraphLaunch", c_void_p, c_void_p)
def _launch_graph(state: State, handle: int, stream: int | None) -> None:
    graph = state.get(handle, Graph)
    state.enqueue(stream or 0, lambda: state.launch_graph(handle, graph))


@_call("cuGraphExecDestroy", c_void_p)
def _end_exec(state: State, handle: int) -> None:
    if state.handles.pop(handle, None) is None:
        raise Failure(INVALID_HANDLE, f"0x{handle:x} is no graph")


@_call("cuGraphDestroy", c_void_p)
def _end_graph(state: State, handle: int) -> None:
    _end_exec(state, handle)


_ENCODE = (c_void_p, c_int, c_uint, c_void_p, POINTER(c_uint64), POINTER(c_uint64), POINTER(c_uint), POINTER(c_uint))


@_call("cuTensorMapEncodeTiled", *_ENCODE, *[c_int] * 4)
def _encode(state: State, *args: Any) -> None:
    out, kind, rank, base, dims, strides, box, steps, interleave, swizzle, _, fill = args
    if base % 16 or any(strides[n] % 16 for n in range(rank - 1)):
        raise Failure(INVALID_VALUE, f"a tensor map's address 0x{base:x} and strides must be multiples of 16")
    if any(not 1 <= box[n] <= 256 or steps[n] != 1 for n in range(rank)) or interleave or fill:
        raise Failure(INVALID_VALUE, "a tensor map with a box beyond 256, steps, interleaving or a fill")
    element, row = _ELEMENT[kind], (0, 32, 64, 128)[swizzle]
    if row and box[0] * element > row:
        raise Failure(
            INVALID_VALUE, f"a tensor map's rows of {box[0] * element} bytes are wider than its swizzle of {row}"
        )
    lengths = tuple(dims[n] for n in range(rank))
    steps_in_bytes = (element, *(strides[n] for n in range(rank - 1)))
    tensor = TensorMap(base, element, lengths, steps_in_bytes, tuple(box[n] for n in range(rank)), swizzle)
    ctypes.memmove(out, tensor.encode(), MAP_BYTES)
