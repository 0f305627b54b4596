"""Reads a cubin without any tool: in go the bytes of an ELF file, out come its SM and each kernel's resources.

The attributes lie in the sections `.nv.info` (of all kernels) and `.nv.info.<kernel>`: a format byte, an attribute
byte, then either 16 bits of value or a length and that many bytes. Their numbers are those that cuobjdump prints as
EIATTR_*.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from planc.errors import PlancError

_REQNTID = 0x10
_FRAME_SIZE = 0x11
_KPARAM_INFO = 0x17
_REGCOUNT = 0x2F
_SIZED = 4  # the format whose 16 bits are a length
_ABI_WITH_WIDE_SM = 8  # CUDA 13: the SM moved from the low byte of e_flags to the next
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_NO_BITS = 8  # the type of a section that takes memory and no bytes of the file


@dataclass(frozen=True)
class Resources:
    """What one kernel takes: registers a thread, bytes of stack a thread (spills among them), threads a block, bytes of
    static shared memory, bytes of code, and (offset, size) of each parameter in order.
    """

    registers: int
    stack: int
    threads: int
    static_shared: int
    code: int
    params: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Cubin:
    """A cubin's SM (90 for sm_90a) and its kernels by name."""

    sm: int
    kernels: Mapping[str, Resources]


class _Section(NamedTuple):
    data: bytes
    size: int


@dataclass
class _Found:
    """Attributes of one kernel, as they are met."""

    values: dict[int, int] = field(default_factory=dict)
    params: list[tuple[int, int, int]] = field(default_factory=list)  # ordinal, offset, size


def read(data: bytes) -> Cubin:
    """The cubin that `data` holds. PlancError when it is none, or is cut short."""
    if data[:4] != b"\x7fELF" or len(data) < 64:
        raise PlancError("not a cubin: it does not begin as an ELF file does; build the plan again")
    try:
        return _read(data)
    except (struct.error, IndexError, KeyError, ValueError) as e:
        raise PlancError(f"a cubin of {len(data)} bytes cannot be read ({e!r}); build the plan again") from e


def _read(data: bytes) -> Cubin:
    flags = struct.unpack_from("<I", data, 0x30)[0]
    sm = (flags >> 8 if data[8] >= _ABI_WITH_WIDE_SM else flags) & 0xFF
    sections = _sections(data)
    names = _symbols(sections)
    found = {name.removeprefix(".text."): _Found() for name in sections if name.startswith(".text.")}
    for attribute, value in _attributes(sections[".nv.info"].data):
        if attribute in (_REGCOUNT, _FRAME_SIZE) and isinstance(value, bytes):
            symbol, number = struct.unpack("<II", value)
            if names[symbol] in found:
                found[names[symbol]].values[attribute] = number
    for name, kernel in found.items():
        _own_attributes(kernel, sections[f".nv.info.{name}"].data)
    return Cubin(sm, {name: _resources(name, kernel, sections) for name, kernel in found.items()})


def _sections(data: bytes) -> dict[str, _Section]:
    (start,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", data, 0x3A)
    headers = [_SECTION.unpack_from(data, start + i * size) for i in range(count)]
    names = data[headers[names_at][4] :]
    out = {}
    for h in headers:
        end = h[4] + (0 if h[1] == _NO_BITS else h[5])
        if end > len(data):
            raise ValueError("it is cut short")
        out[_text(names, h[0])] = _Section(data[h[4] : end], h[5])
    return out


def _symbols(sections: Mapping[str, _Section]) -> list[str]:
    return [_text(sections[".strtab"].data, s[0]) for s in _SYMBOL.iter_unpack(sections[".symtab"].data)]


def _text(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()


def _attributes(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at + 4 <= len(data):
        kind, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if kind == _SIZED:
            yield attribute, data[at : at + value]
            at += value
        else:
            yield attribute, value


def _own_attributes(kernel: _Found, data: bytes) -> None:
    for attribute, value in _attributes(data):
        if not isinstance(value, bytes):
            continue
        if attribute == _KPARAM_INFO:
            _, ordinal, offset, packed = struct.unpack("<IHHI", value)
            kernel.params.append((ordinal, offset, packed >> 18))
        elif attribute == _REQNTID:
            x, y, z = struct.unpack("<III", value)
            kernel.values[_REQNTID] = x * y * z


def _resources(name: str, kernel: _Found, sections: Mapping[str, _Section]) -> Resources:
    shared = sections.get(f".nv.shared.{name}")
    return Resources(
        registers=kernel.values[_REGCOUNT],
        stack=kernel.values.get(_FRAME_SIZE, 0),
        threads=kernel.values.get(_REQNTID, 0),
        static_shared=shared.size if shared else 0,
        code=sections[f".text.{name}"].size,
        params=tuple((offset, size) for _, offset, size in sorted(kernel.params)),
    )
