"""Sections and kernels of a cubin's ELF file. Read here, as a first call would wait 30 ms for the
import of a library that reads them."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_IDENT = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_CUDA = 190  # EM_CUDA
_NO_BITS, _COMPRESSED = 8, 0x800  # SHT_NOBITS, SHF_COMPRESSED
_FUNCTION, _ENTRY = 2, 0x10  # STT_FUNC of st_info, STO_CUDA_ENTRY of st_other


class Section(NamedTuple):
    size: int
    data: bytes
    """b"" of a section without bits in the file."""
    link: int
    """The number of another: of symbols, that of their names."""


def sections(binary: bytes) -> Mapping[str, Section]:
    """By name, in the file's order. Raises ValueError or struct.error for what is no cubin, or not
    whole."""
    ident, _, machine, _, _, _, start, _, _, _, _, size, count, names = _HEADER.unpack_from(binary)
    if (ident[:6], machine, size) != (_IDENT, _CUDA, _SECTION.size):
        raise ValueError("no 64-bit ELF for NVIDIA GPUs")
    headers = list(_SECTION.iter_unpack(binary[start : start + count * size]))
    if not names < len(headers) == count:
        raise ValueError("sections are missing")
    read = []
    for number, (_, kind, flags, _, at, length, link, *_) in enumerate(headers):
        data = b"" if kind == _NO_BITS else binary[at : at + length]
        if flags & _COMPRESSED or (kind != _NO_BITS and len(data) != length):
            raise ValueError(f"section {number} is compressed or ends beyond the file")
        read.append(Section(length, data, link))
    return {_text(read[names], h[0]): s for h, s in zip(headers, read, strict=True)}


def kernels(of: Mapping[str, Section]) -> Iterator[tuple[int, str]]:
    """(symbol number, name) of each kernel. Raises KeyError, IndexError, ValueError or struct.error
    where the symbols are damaged."""
    symbols = of[".symtab"]
    names = [*of.values()][symbols.link]
    for number, (name, info, other, *_) in enumerate(_SYMBOL.iter_unpack(symbols.data)):
        if other & _ENTRY and info & 0xF == _FUNCTION:
            yield number, _text(names, name)


def _text(names: Section, at: int) -> str:
    return names.data[at : names.data.index(b"\0", at)].decode()
