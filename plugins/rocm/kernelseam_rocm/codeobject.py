"""What an AMDGPU code object says of its kernels: the metadata note of its ELF, read in pure
Python.

Format: LLVM's "User Guide for AMDGPU Backend", code object V4 and V5.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack
from kernelseam.contract import KernelFacts
from kernelseam.errors import InvalidValue

LOAD, DYNAMIC, _NOTE = 1, 2, 4  # PT_LOAD, PT_DYNAMIC, PT_NOTE
_MACHINE, _DYNSYM, _METADATA = 224, 11, 32  # EM_AMDGPU, SHT_DYNSYM, NT_AMDGPU_METADATA


@dataclass(frozen=True)
class Segment:
    """A program header: where its bytes are in the file, and where in memory they belong."""

    kind: int
    offset: int
    address: int
    file_bytes: int
    memory_bytes: int


@dataclass(frozen=True)
class CodeObject:
    """Metadata and machine code of a code object."""

    target: str
    """The ISA's full name, as "amdgcn-amd-amdhsa--gfx942"."""
    kernels: Mapping[str, Mapping[str, Any]]
    """By name, the kernel's metadata."""
    code: Mapping[str, tuple[int, bytes]]
    """By name, the kernel's virtual address and its machine code."""
    segments: tuple[Segment, ...] = ()
    symbols: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By name, virtual address and size of everything in the dynamic symbol table."""


def parse(elf: bytes) -> CodeObject:
    """Read a code object. Raises InvalidValue where the bytes are none."""
    try:
        return _parse(elf)
    except (struct.error, IndexError, KeyError, ValueError, TypeError, StopIteration) as e:
        raise InvalidValue(
            "binary",
            f"{len(elf)} bytes",
            "must be an AMDGPU code object in ELF form",
            "Compile it again",
        ) from e


def _parse(elf: bytes) -> CodeObject:
    machine = struct.unpack_from("<H", elf, 18)[0]
    if elf[:5] != b"\x7fELF\x02" or machine != _MACHINE:
        raise ValueError("not an AMDGPU ELF")
    segments_at, sections_at = struct.unpack_from("<QQ", elf, 32)
    _, segments, section_size, sections = struct.unpack_from("<HHHH", elf, 54)
    headers = tuple(_segment(elf, segments_at + 56 * i) for i in range(segments))
    metadata = next(_metadata(elf, h.offset, h.file_bytes) for h in headers if h.kind == _NOTE)
    symbols = _symbols(elf, [sections_at + section_size * i for i in range(sections)])
    kernels = {k[".name"]: k for k in metadata["amdhsa.kernels"]}
    code = {}
    for name in kernels:
        address, size = symbols[name]
        load = next(
            h for h in headers if h.kind == LOAD and h.address <= address < h.address + h.file_bytes
        )
        start = address - load.address + load.offset
        code[name] = address, elf[start : start + size]
    return CodeObject(metadata["amdhsa.target"], kernels, code, headers, symbols)


def _segment(elf: bytes, at: int) -> Segment:
    # Type, flags, offset, address, physical address, file size, memory size, alignment.
    kind, _, offset, address, _, file_bytes, memory_bytes, _ = struct.unpack_from(
        "<IIQQQQQQ", elf, at
    )
    return Segment(kind, offset, address, file_bytes, memory_bytes)


def _metadata(elf: bytes, start: int, size: int) -> dict[str, Any]:
    at = start
    while at < start + size:
        name_size, size_, kind = struct.unpack_from("<III", elf, at)
        name = elf[at + 12 : at + 12 + name_size].rstrip(b"\0")
        body = at + 12 + (name_size + 3 & ~3)
        if name == b"AMDGPU" and kind == _METADATA:
            found: dict[str, Any] = msgpack.unpackb(elf[body : body + size_])
            return found
        at = body + (size_ + 3 & ~3)
    raise ValueError("no metadata note")


def _symbols(elf: bytes, sections: list[int]) -> dict[str, tuple[int, int]]:
    """Address and size by name, from the dynamic symbol table."""
    found = {}
    for section in sections:
        _, kind, _, _, offset, size, link, _, _, entry = struct.unpack_from(
            "<IIQQQQIIQQ", elf, section
        )
        if kind != _DYNSYM:
            continue
        names = struct.unpack_from("<Q", elf, sections[link] + 24)[0]
        for at in range(offset, offset + size, entry):
            name, _, _, _, address, length = struct.unpack_from("<IBBHQQ", elf, at)
            end = elf.index(b"\0", names + name)
            found[elf[names + name : end].decode()] = (address, length)
    return found


def facts(code: CodeObject, name: str, counts: Mapping[str, int]) -> KernelFacts:
    """A kernel's facts. ``counts`` (of `disassembly.count`) is empty where nothing could be
    disassembled; the matrix instructions are -1 then."""
    k = code.kernels[name]
    explicit = [a for a in k.get(".args", ()) if not a[".value_kind"].startswith("hidden_")]
    extra = {
        "sgprs": k[".sgpr_count"],
        "agprs": k.get(".agpr_count", 0),
        "sgpr_spills": k.get(".sgpr_spill_count", 0),
        "vgpr_spills": k.get(".vgpr_spill_count", 0),
        "wavefront": k[".wavefront_size"],
        "max_threads": k[".max_flat_workgroup_size"],
        "code_bytes": len(code.code[name][1]),
    }
    extra.update((key, n) for key, n in counts.items() if key != "matrix_instructions")
    return KernelFacts(
        name=name,
        registers=k[".vgpr_count"],
        spills=extra["sgpr_spills"] + extra["vgpr_spills"],
        scratch_bytes=k[".private_segment_fixed_size"],
        shared_bytes=k[".group_segment_fixed_size"],
        matrix_instructions=counts.get("matrix_instructions", -1),
        parameters=tuple((a[".offset"], a[".size"]) for a in explicit),
        extra=extra,
    )
