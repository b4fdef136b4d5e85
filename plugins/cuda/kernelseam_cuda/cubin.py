"""Facts of a cubin's kernels: the sections of its ELF and the attributes in .nv.info.

NVIDIA documents the names of the attributes (``cuobjdump -elf`` prints them), not their encoding.
The encoding here was checked against cuobjdump and the compiler's own report, for nvrtc 12.9 and
13.5.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from kernelseam.contract import KernelFacts
from kernelseam.errors import DeviceError

from kernelseam_cuda import elf
from kernelseam_cuda.disassembly import count

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


def facts(binary: bytes) -> dict[str, KernelFacts]:
    """Facts of every kernel in a cubin, by name. ``spills`` counts the bytes that it stores to
    local memory.

    Raises DeviceError for anything but a whole cubin.
    """
    try:
        return _facts(binary)
    except (ValueError, LookupError, struct.error) as e:
        raise DeviceError(f"the binary is not a cubin, or a damaged one: {e!r}") from e


def _facts(binary: bytes) -> dict[str, KernelFacts]:
    sections = elf.sections(binary)
    numbers = _numbers(sections[".nv.info"].data)
    reserved = _RESERVED if ".nv.shared.reserved.0" in sections else 0
    kernels = {}
    for number, name in elf.kernels(sections):
        counts = count(sections[f".text.{name}"].data)
        shared = sections.get(f".nv.shared.{name}")
        kernels[name] = KernelFacts(
            name=name,
            registers=numbers[_REGCOUNT, number],
            spills=counts["local_store_bytes"],
            scratch_bytes=max(numbers.get((a, number), 0) for a in (_FRAME_SIZE, _MIN_STACK_SIZE)),
            shared_bytes=max(shared.size - reserved, 0) if shared else 0,
            matrix_instructions=counts["matrix_instructions"],
            parameters=_parameters(sections[f".nv.info.{name}"].data),
            extra=counts,
        )
    return kernels


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, value) of each entry of a .nv.info section that has a value of its own size."""
    at = 0
    while at < len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _SIZED:
            yield attribute, data[at : at + size]
            at += size


def _numbers(data: bytes) -> dict[tuple[int, int], int]:
    """(attribute, symbol number) → value, for the attributes that hold one number a function."""
    result = {}
    for attribute, value in _attributes(data):
        if attribute in (_REGCOUNT, _FRAME_SIZE, _MIN_STACK_SIZE):
            symbol, number = struct.unpack("<II", value)
            result[attribute, symbol] = number
    return result


def _parameters(data: bytes) -> tuple[tuple[int, int], ...]:
    """(offset, size) of each parameter, in order.

    Offsets count from the start of the parameters in constant memory, itself aligned to 16 bytes
    only: a parameter of wider alignment (a tensor map's 64) lies where its address there is
    aligned, not where a C structure would have it.
    """
    parameters = {}
    for attribute, value in _attributes(data):
        if attribute == _KPARAM_INFO:
            _, ordinal, offset, flags = struct.unpack("<IHHI", value)
            parameters[ordinal] = offset, flags >> 18
        elif attribute == _KPARAM_INFO_V2:  # of kernels that take more than 4 KiB
            _, ordinal, offset, size = struct.unpack_from("<IHHH", value)
            parameters[ordinal] = offset, size
    return tuple(parameters[i] for i in range(len(parameters)))
