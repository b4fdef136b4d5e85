"""Facts of an AMDGPU code object's kernels: the metadata note of its ELF, and their machine
code.

Format: LLVM's "User Guide for AMDGPU Backend", code object V4 and V5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack
from kernelseam.contract import KernelFacts
from kernelseam.elf import DYNAMIC_SYMBOLS, LOAD, Elf
from kernelseam.errors import InvalidValue

_MACHINE = 224  # EM_AMDGPU
_METADATA = 32  # NT_AMDGPU_METADATA


@dataclass(frozen=True)
class CodeObject:
    """Metadata and machine code of a code object."""

    target: str
    """The ISA's full name, as "amdgcn-amd-amdhsa--gfx942"."""
    kernels: Mapping[str, Mapping[str, Any]]
    """By name, the kernel's metadata."""
    code: Mapping[str, tuple[int, bytes]]
    """By name, the kernel's virtual address and its machine code."""
    symbols: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By name, virtual address and size of everything in the dynamic symbol table."""


def parse(elf: bytes) -> CodeObject:
    """Read a code object. Raises InvalidValue where the bytes are none."""
    try:
        return _parse(elf)
    except Exception as e:  # msgpack raises of many types for a damaged file
        raise InvalidValue(
            "binary",
            f"{len(elf)} bytes",
            "must be an AMDGPU code object in ELF form",
            "Compile it again",
        ) from e


def _parse(binary: bytes) -> CodeObject:
    elf = Elf(binary)
    if elf.machine != _MACHINE:
        raise ValueError("not an AMDGPU ELF")
    metadata = _metadata(elf)
    symbols = {s.name: (s.address, s.size) for s in elf.symbols(DYNAMIC_SYMBOLS)}
    loads = list(elf.segments(LOAD))
    kernels = {k[".name"]: k for k in metadata["amdhsa.kernels"]}
    code = {}
    for name in kernels:
        address, size = symbols[name]
        load = next(s for s in loads if 0 <= address - s.address <= s.file_size - size)
        code[name] = address, elf.bytes_at(address - load.address + load.offset, size)
    return CodeObject(metadata["amdhsa.target"], kernels, code, symbols)


def _metadata(elf: Elf) -> Mapping[str, Any]:
    for name, kind, description in elf.notes():
        if (name, kind) == ("AMDGPU", _METADATA):
            metadata: Mapping[str, Any] = msgpack.unpackb(description)
            return metadata
    raise ValueError("no metadata note")


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
