"""The sections and symbols of a 64-bit little-endian ELF file: what cubins need of the format.

A cubin's binary is read in every process that uses it, so this reads no more than is asked for.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

MACHINE_CUDA = 190  # EM_CUDA
NO_BITS, SYMBOL_TABLE = 8, 2  # SHT_NOBITS, SHT_SYMTAB
FUNCTION = 2  # STT_FUNC
_IDENT = b"\x7fELF\x02\x01"  # 64-bit, little-endian
_FILE = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_COMPRESSED = 0x800  # SHF_COMPRESSED
_MANY = 0xFF00
"""From this number on, numbers of sections are stored elsewhere (SHN_LORESERVE)."""


@dataclass(frozen=True)
class Section:
    """A section of a file; ``data`` is empty where it has a size alone."""

    name: str
    kind: int
    size: int
    entry_size: int
    link: int
    data: memoryview


@dataclass(frozen=True)
class Symbol:
    """A symbol. ``other`` is its byte st_other."""

    name: str
    kind: int
    other: int


def sections(file: bytes, machine: int) -> list[Section]:
    """The sections of a file, in order. Raises ValueError for another kind of file, and for one
    that is not whole."""
    try:
        ident, _, its_machine, *_, header, count, names = _FILE.unpack_from(file)
    except struct.error as e:
        raise ValueError("no ELF file: it has no header") from e
    if ident[:6] != _IDENT or its_machine != machine or header != _SECTION.size:
        raise ValueError(f"no 64-bit little-endian ELF for machine {machine}")
    start = _FILE.unpack_from(file)[6]
    if max(count, names) >= _MANY or start + count * header > len(file) or names >= max(count, 1):
        raise ValueError("its section headers end beyond the file")
    view = memoryview(file)
    headers = [_SECTION.unpack_from(file, start + i * header) for i in range(count)]
    strings = _data(view, headers[names]) if headers else view[:0]
    return [
        Section(_string(strings, h[0]), h[1], h[5], h[9], h[6], _data(view, h)) for h in headers
    ]


def _data(file: memoryview, header: tuple[int, ...]) -> memoryview:
    _, kind, flags, _, offset, size, *_ = header
    if kind == NO_BITS:
        return file[:0]
    if flags & _COMPRESSED or offset + size > len(file):
        raise ValueError("a section is compressed, or ends beyond the file")
    return file[offset : offset + size]


def symbols(listed: list[Section]) -> Iterator[tuple[int, Symbol]]:
    """(number, symbol) of the file's symbol table. Raises ValueError without one."""
    tables = [s for s in listed if s.kind == SYMBOL_TABLE and s.entry_size == _SYMBOL.size]
    if len(tables) != 1 or tables[0].size % _SYMBOL.size or tables[0].link >= len(listed):
        raise ValueError("the symbols are missing")
    strings = listed[tables[0].link].data
    for number, (name, info, other, *_) in enumerate(_SYMBOL.iter_unpack(tables[0].data)):
        yield number, Symbol(_string(strings, name), info & 0xF, other)


def _string(table: memoryview, at: int) -> str:
    if at >= len(table):
        raise ValueError("a name lies beyond its table")
    return bytes(table[at:]).split(b"\0", 1)[0].decode()
