"""Sections, segments, symbols and notes of a 64-bit little-endian ELF file, as vendors' compilers
write their binaries.

Format: "Tool Interface Standard (TIS) Executable and Linking Format", 1.2, and the "ELF-64 Object
File Format". Every read is checked against the file's size: ValueError says what is not whole.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

NOBITS, SYMBOLS, DYNAMIC_SYMBOLS = 8, 2, 11
"""Types of sections: SHT_NOBITS, SHT_SYMTAB, SHT_DYNSYM."""
LOAD, NOTE = 1, 4
"""Types of segments: PT_LOAD, PT_NOTE."""
FUNCTION = 2
"""Type of a symbol: STT_FUNC."""
_COMPRESSED = 0x800
_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_HEADER = struct.Struct("<16xHHIQQQIHHHHHH")
_SECTION, _SEGMENT = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IIQQQQQQ")
_SYMBOL, _NOTE = struct.Struct("<IBBHQQ"), struct.Struct("<III")


@dataclass(frozen=True)
class Section:
    """A section's header; ``name`` is read from the table of names."""

    name: str
    type: int
    flags: int
    offset: int
    size: int
    link: int
    entry_size: int


@dataclass(frozen=True)
class Segment:
    """A segment as it is loaded: ``file_size`` bytes at ``offset``, to ``address``."""

    type: int
    offset: int
    address: int
    file_size: int


@dataclass(frozen=True)
class Symbol:
    name: str
    type: int
    other: int
    """st_other, in full."""
    address: int
    size: int


class Elf:
    """One file. Raises ValueError where it is none, or not whole."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        if not data.startswith(_MAGIC):
            raise ValueError("no 64-bit little-endian ELF")
        (_, self.machine, _, _, segments, sections, _, _, *counts) = self._unpack(_HEADER, 0)
        segment_size, segment_count, section_size, section_count, self._names = counts
        if segment_count and segment_size != _SEGMENT.size:
            raise ValueError(f"program headers of {segment_size} bytes")
        if section_count and section_size != _SECTION.size:
            raise ValueError(f"section headers of {section_size} bytes")
        self._segments, self._segment_count = segments, segment_count
        self._sections, self._section_count = sections, section_count

    def _unpack(self, form: struct.Struct, at: int) -> tuple[int, ...]:
        return form.unpack(self.bytes_at(at, form.size))

    def bytes_at(self, offset: int, size: int) -> bytes:
        """So many bytes of the file. Raises ValueError where it ends before."""
        result = self._data[offset : offset + size]
        if len(result) != size:
            raise ValueError(f"{size} bytes at {offset} end beyond the file")
        return result

    def _text(self, table: Section, at: int) -> str:
        end = self._data.find(b"\0", table.offset + at, table.offset + table.size)
        if end < 0:
            raise ValueError(f"a name at {at} does not end in {table.name or 'its table'}")
        return self._data[table.offset + at : end].decode()

    @cached_property
    def _by_number(self) -> list[Section]:
        headers = [
            self._unpack(_SECTION, self._sections + i * _SECTION.size)
            for i in range(self._section_count)
        ]
        if not headers:
            return []
        _, kind, flags, _, offset, size, link, *_ = headers[self._names]
        names = Section("", kind, flags, offset, size, link, 0)
        named = self._names != 0  # SHN_UNDEF: there is no table of names
        return [
            Section(
                self._text(names, name) if named else "",
                kind,
                flags,
                offset,
                size,
                link,
                entry_size,
            )
            for name, kind, flags, _, offset, size, link, _, _, entry_size in headers
        ]

    @property
    def sections(self) -> dict[str, Section]:
        """By name. Raises ValueError where one is compressed or ends beyond the file."""
        for s in self._by_number:
            if s.flags & _COMPRESSED:
                raise ValueError(f"section {s.name} is compressed")
            if s.type != NOBITS:
                self.bytes_at(s.offset, s.size)
        return {s.name: s for s in self._by_number}

    def content(self, section: Section) -> bytes:
        """A section's bytes."""
        return self.bytes_at(section.offset, section.size)

    def segments(self, kind: int) -> Iterator[Segment]:
        """Those of one type, in the file's order."""
        for i in range(self._segment_count):
            type_, _, offset, address, _, size, _, _ = self._unpack(
                _SEGMENT, self._segments + i * _SEGMENT.size
            )
            if type_ == kind:
                self.bytes_at(offset, size)
                yield Segment(type_, offset, address, size)

    def symbols(self, kind: int) -> list[Symbol]:
        """Those of the one section of this type, by number. Raises ValueError where there is no
        such section, or several."""
        tables = [s for s in self._by_number if s.type == kind]
        if len(tables) != 1 or tables[0].entry_size != _SYMBOL.size:
            raise ValueError(f"{len(tables)} symbol tables of type {kind}")
        names = self._by_number[tables[0].link]
        return [
            Symbol(self._text(names, name), info & 15, other, address, size)
            for name, info, other, _, address, size in _SYMBOL.iter_unpack(self.content(tables[0]))
        ]

    def notes(self) -> Iterator[tuple[str, int, bytes]]:
        """(name, type, description) of each note."""
        for segment in self.segments(NOTE):
            at, end = segment.offset, segment.offset + segment.file_size
            while at < end:
                name_size, size, kind = self._unpack(_NOTE, at)
                at += _NOTE.size
                name = self.bytes_at(at, name_size)
                at += -(-name_size // 4) * 4
                yield name.rstrip(b"\0").decode(), kind, self.bytes_at(at, size)
                at += -(-size // 4) * 4
