"""Small AMDGPU code objects, made byte by byte: one kernel with its descriptor, and relocations
where wanted."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

DESCRIPTOR_AT, TABLE_AT, CODE_AT = 0x1000, 0x1080, 0x1100
"""Where in memory the kernel's descriptor, eight words to relocate and the code lie."""


def descriptor(
    shared: int = 0,
    scratch: int = 0,
    kernarg: int = 16,
    entry: int = CODE_AT - DESCRIPTOR_AT,
    rsrc1: int = 3 << 16,
    rsrc2: int = 2 << 1 | 1 << 7,
    properties: int = 8,
    preload: int = 0,
) -> bytes:
    """A kernel descriptor: by default two user registers, the address of the arguments, and block
    indices along x."""
    head = struct.pack("<IIIIq20x", shared, scratch, kernarg, 0, entry)
    return head + struct.pack("<IIIHH4x", 0, rsrc1, rsrc2, properties, preload)


def metadata(**changes: Any) -> dict[str, Any]:
    """A kernel's entry in the metadata."""
    return {
        ".name": "k",
        ".symbol": "k.kd",
        ".vgpr_count": 8,
        ".sgpr_count": 8,
        ".private_segment_fixed_size": 0,
        ".group_segment_fixed_size": 0,
        ".wavefront_size": 32,
        ".max_flat_workgroup_size": 64,
        ".kernarg_segment_size": 16,
        ".args": [
            {".offset": 0, ".size": 8, ".value_kind": "global_buffer"},
            {".offset": 8, ".size": 8, ".value_kind": "by_value"},
        ],
        **changes,
    }


def elf(
    code: bytes,
    kernel: dict[str, Any] | None = None,
    kd: bytes | None = None,
    target: str = "gfx1100",
    relocations: Sequence[tuple[int, int, int, int]] = (),
) -> bytes:
    """A code object. ``relocations``: (word of the table, type, symbol, addend); symbol 1 is the
    kernel's code, symbol 2 its descriptor, symbol 3 is defined nowhere."""
    import msgpack

    body = msgpack.packb(
        {
            "amdhsa.target": f"amdgcn-amd-amdhsa--{target}",
            "amdhsa.kernels": [metadata() if kernel is None else kernel],
        }
    )
    note = struct.pack("<III", 7, len(body), 32) + b"AMDGPU\0\0" + body + bytes(-len(body) % 4)
    names = b"\0k\0k.kd\0elsewhere\0"
    symbols = bytes(24)
    for name, section, address, size in (
        (1, 1, CODE_AT, len(code)),
        (3, 1, DESCRIPTOR_AT, 64),
        (8, 0, 0, 0),
    ):
        symbols += struct.pack("<IBBHQQ", name, 0x12, 0, section, address, size)
    rela = b"".join(
        struct.pack("<QQq", TABLE_AT + 8 * word, symbol << 32 | kind, addend)
        for word, kind, symbol, addend in relocations
    )
    # The file is laid out as memory is: headers, symbols, dynamic section, relocations, then the
    # pages of the kernel.
    segments, at = 4, 64 + 4 * 56
    at_note, at_symbols = at, at + len(note)
    at_names = at_symbols + len(symbols)
    at_dynamic = -(-(at_names + len(names)) // 8) * 8
    at_rela = at_dynamic + 96
    tags = (7, at_rela, 8, len(rela), 9, 24, 6, at_symbols, 5, at_names, 0, 0)
    dynamic = struct.pack("<12Q", *tags)  # DT_RELA, RELASZ, RELAENT, SYMTAB, STRTAB, NULL
    at_sections = CODE_AT + len(code)
    memory = bytearray(at_sections)
    for place, data in (
        (at_note, note),
        (at_symbols, symbols),
        (at_names, names),
        (at_dynamic, dynamic),
        (at_rela, rela),
        (DESCRIPTOR_AT, kd or descriptor()),
        (CODE_AT, code),
    ):
        memory[place : place + len(data)] = data
    memory[:64] = (
        b"\x7fELF\x02\x01\x01\x40"
        + bytes(8)
        + struct.pack(
            "<HHIQQQIHHHHHH", 3, 224, 1, 0, 64, at_sections, 0, 64, 56, segments, 64, 3, 0
        )
    )
    for i, (kind, start, end) in enumerate(
        (
            (4, at_note, at_symbols),
            (1, 0, DESCRIPTOR_AT),
            (1, DESCRIPTOR_AT, at_sections),
            (2, at_dynamic, at_rela),
        )
    ):
        struct.pack_into(
            "<IIQQQQQQ",
            memory,
            64 + 56 * i,
            kind,
            7,
            start,
            start,
            start,
            end - start,
            end - start,
            4096,
        )
    sections = bytes(64)
    sections += struct.pack(
        "<IIQQQQIIQQ", 0, 11, 0, at_symbols, at_symbols, len(symbols), 2, 1, 8, 24
    )
    sections += struct.pack("<IIQQQQIIQQ", 0, 3, 0, at_names, at_names, len(names), 0, 0, 1, 0)
    return bytes(memory) + sections
