"""What a cubin says of its kernels, read in pure Python: the sections of its ELF and the attributes
in .nv.info.

NVIDIA documents the names of the attributes (``cuobjdump -elf`` prints them), not their encoding.
The encoding here was checked against cuobjdump and the compiler's own report, for nvrtc 12.9 and
13.5.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kernelseam.contract import KernelFacts
from kernelseam.errors import DeviceError

from kernelseam_cuda.disassembly import count

_MACHINE = 190  # EM_CUDA
_SYMTAB, _EMPTY, _NOBITS = 2, 0, 8  # SHT_…
_FUNCTION, _ENTRY = 2, 0x10  # STT_FUNC; STO_CUDA_ENTRY, a bit of a symbol's "other"
# EIFMT_SVAL: a 16-bit size, then the value; the other formats hold the value in those 16 bits
_SIZED = 4
# EIATTR_…
_FRAME_SIZE, _MIN_STACK_SIZE, _KPARAM_INFO, _REGCOUNT, _KPARAM_INFO_V2 = (
    0x11,
    0x12,
    0x17,
    0x2F,
    0x45,
)
_RESERVED = 1024
"""Bytes that the system keeps of a block's shared memory from sm_90 on; a kernel's own section
counts them too."""


@dataclass(frozen=True)
class Section:
    """A section's type, size in bytes, and bytes (none for memory that starts out
    uninitialised)."""

    kind: int
    size: int
    data: memoryview


def facts(binary: bytes) -> dict[str, KernelFacts]:
    """Facts of every kernel in a cubin, by name. ``spills`` counts the bytes that it stores to
    local memory.

    Raises DeviceError for anything but a whole cubin.
    """
    try:
        return _facts(binary)
    except (struct.error, IndexError, KeyError, UnicodeDecodeError) as e:
        raise DeviceError(f"the binary is not a cubin, or a damaged one: {e!r}") from e


def _facts(binary: bytes) -> dict[str, KernelFacts]:
    sections = _sections(binary)
    numbers = _numbers(sections[".nv.info"].data)
    reserved = _RESERVED if ".nv.shared.reserved.0" in sections else 0
    found = {}
    for number, name in _kernels(sections):
        counts = count(sections[f".text.{name}"].data)
        shared = sections.get(f".nv.shared.{name}")
        found[name] = KernelFacts(
            name=name,
            registers=numbers[_REGCOUNT, number],
            spills=counts["local_store_bytes"],
            scratch_bytes=max(numbers.get((a, number), 0) for a in (_FRAME_SIZE, _MIN_STACK_SIZE)),
            shared_bytes=max(shared.size - reserved, 0) if shared else 0,
            matrix_instructions=counts["matrix_instructions"],
            parameters=_parameters(sections[f".nv.info.{name}"].data),
            extra=counts,
        )
    return found


def _sections(binary: bytes) -> Mapping[str, Section]:
    if binary[:5] != b"\x7fELF\x02" or struct.unpack_from("<H", binary, 18)[0] != _MACHINE:
        raise IndexError("no 64-bit ELF for NVIDIA GPUs")
    whole = memoryview(binary)

    def part(offset: int, size: int) -> memoryview:
        if offset + size > len(whole):
            raise IndexError(f"a section ends at byte {offset + size}")
        return whole[offset : offset + size]

    (start,) = struct.unpack_from("<Q", binary, 40)
    entry, number, names = struct.unpack_from("<HHH", binary, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", binary, start + entry * i) for i in range(number)]
    strings = bytes(part(headers[names][4], headers[names][5]))
    return {
        _text(strings, name): Section(
            kind, size, whole[:0] if kind in (_EMPTY, _NOBITS) else part(offset, size)
        )
        for name, kind, _, _, offset, size, *_ in headers
    }


def _text(strings: bytes, at: int) -> str:
    return strings[at:].partition(b"\0")[0].decode()


def _kernels(sections: Mapping[str, Section]) -> Iterator[tuple[int, str]]:
    """(symbol number, name) of each kernel."""
    strings, symbols = bytes(sections[".strtab"].data), sections[".symtab"]
    if symbols.kind != _SYMTAB:
        raise IndexError("the symbols are missing")
    for number in range(symbols.size // 24):
        name, info, other = struct.unpack_from("<IBB", symbols.data, 24 * number)
        if info & 15 == _FUNCTION and other & _ENTRY:
            yield number, _text(strings, name)


def _attributes(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """(attribute, value) of each entry of a .nv.info section that has a value of its own size."""
    at = 0
    while at < len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _SIZED:
            yield attribute, data[at : at + size]
            at += size


def _numbers(data: memoryview) -> dict[tuple[int, int], int]:
    """(attribute, symbol number) → value, for the attributes that hold one number a function."""
    found = {}
    for attribute, value in _attributes(data):
        if attribute in (_REGCOUNT, _FRAME_SIZE, _MIN_STACK_SIZE):
            symbol, number = struct.unpack("<II", value)
            found[attribute, symbol] = number
    return found


def _parameters(data: memoryview) -> tuple[tuple[int, int], ...]:
    """(offset, size) of each parameter, in order.

    Offsets count from the start of the parameters in constant memory, itself aligned to 16 bytes
    only: a parameter of wider alignment (a tensor map's 64) lies where its address there is
    aligned, not where a C structure would have it.
    """
    found = {}
    for attribute, value in _attributes(data):
        if attribute == _KPARAM_INFO:
            _, ordinal, offset, flags = struct.unpack("<IHHI", value)
            found[ordinal] = offset, flags >> 18
        elif attribute == _KPARAM_INFO_V2:  # of kernels that take more than 4 KiB
            _, ordinal, offset, size = struct.unpack_from("<IHHH", value)
            found[ordinal] = offset, size
    return tuple(found[i] for i in range(len(found)))
