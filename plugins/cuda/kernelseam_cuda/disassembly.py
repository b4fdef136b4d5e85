"""Counting instructions of a kernel from its machine code, without a disassembler.

From sm_70 on an instruction is 16 bytes; the lowest 9 bits name the operation, the next 3 how its
operands are given. The numbers below are what nvdisasm shows (13.5, sm_80 to sm_120).
"""

from __future__ import annotations

import struct

_MATRIX = frozenset(
    {
        0x037,  # IMMA
        0x03C,  # HMMA
        0x03F,  # DMMA
        0x07A,  # QMMA
        0x1EA,  # UTCHMMA, UTCQMMA
        0x1F0,  # HGMMA
        0x1F3,  # QGMMA
    }
)
_STORE_LOCAL, _LOAD_LOCAL = 0x187, 0x183  # STL, LDL
_WIDTHS = (1, 1, 2, 2, 4, 8, 16, 16)
"""Bytes of an access by bits 73 to 75 of the instruction."""


def count(code: bytes | memoryview) -> dict[str, int]:
    """Instructions by kind, and the bytes that local memory instructions move for a thread that
    meets each once.

    ``local_store_bytes`` and ``local_load_bytes`` equal the compiler's "spill stores" and "spill
    loads" for kernels without arrays in local memory; such arrays count too, as does whatever else
    a thread keeps there.
    """
    counts = {
        "instructions": 0,
        "matrix_instructions": 0,
        "local_store_bytes": 0,
        "local_load_bytes": 0,
    }
    for low, high in struct.iter_unpack("<QQ", code):
        operation = low & 0x1FF
        counts["instructions"] += 1
        if operation in _MATRIX:
            counts["matrix_instructions"] += 1
        elif operation == _STORE_LOCAL:
            counts["local_store_bytes"] += _WIDTHS[high >> 9 & 7]
        elif operation == _LOAD_LOCAL:
            counts["local_load_bytes"] += _WIDTHS[high >> 9 & 7]
    return counts
