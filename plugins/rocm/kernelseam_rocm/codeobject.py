"""Facts of an AMDGPU code object's kernels: the metadata note of its ELF, and their machine
code.

Format: LLVM's "User Guide for AMDGPU Backend", code object V4 and V5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from typing import TYPE_CHECKING, Any

import msgpack
from kernelseam.contract import KernelFacts
from kernelseam.errors import InvalidValue

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile

_HEADERS = (56, 64)  # bytes of a program header and a section header
_SYMBOL = 24
_METADATA: object = 32  # NT_AMDGPU_METADATA


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
    from elftools.elf.elffile import ELFFile  # 30 ms, which not every process needs to spend

    try:
        return _parse(elf, ELFFile)
    except Exception as e:  # the libraries raise of many types for a damaged file
        raise InvalidValue(
            "binary",
            f"{len(elf)} bytes",
            "must be an AMDGPU code object in ELF form",
            "Compile it again",
        ) from e


def _parse(elf: bytes, read: Any) -> CodeObject:
    file = read(BytesIO(elf))
    if (file.elfclass, file["e_machine"]) != (64, "EM_AMDGPU"):
        raise ValueError("not an AMDGPU ELF")
    if (file["e_phentsize"], file["e_shentsize"]) != _HEADERS:
        raise ValueError("headers of another size")
    metadata = _metadata(file)
    symbols = _symbols(file)
    loads = list(file.iter_segments("PT_LOAD"))
    if any(s["p_offset"] + s["p_filesz"] > len(elf) for s in loads):
        raise ValueError("a segment ends behind the file's end")
    kernels = {k[".name"]: k for k in metadata["amdhsa.kernels"]}
    code = {}
    for name in kernels:
        address, size = symbols[name]
        load = next(s for s in loads if 0 <= address - s["p_vaddr"] <= s["p_filesz"] - size)
        start = address - load["p_vaddr"] + load["p_offset"]
        code[name] = address, elf[start : start + size]
    return CodeObject(metadata["amdhsa.target"], kernels, code, symbols)


def _metadata(file: ELFFile) -> Mapping[str, Any]:
    segments: Iterable[Any] = file.iter_segments("PT_NOTE")
    for segment in segments:
        for note in segment.iter_notes():
            if note["n_name"] == "AMDGPU" and note["n_type"] == _METADATA:
                metadata: Mapping[str, Any] = msgpack.unpackb(note["n_descdata"])
                return metadata
    raise ValueError("no metadata note")


def _symbols(file: ELFFile) -> dict[str, tuple[int, int]]:
    """Address and size by name, from the dynamic symbol table."""
    tables: Iterable[Any] = file.iter_sections("SHT_DYNSYM")
    (table,) = tables
    if table["sh_entsize"] != _SYMBOL:
        raise ValueError("symbols of another size")
    return {s.name: (s["st_value"], s["st_size"]) for s in table.iter_symbols()}


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
