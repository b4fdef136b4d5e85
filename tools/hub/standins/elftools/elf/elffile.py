"""Sections and symbols of a 64-bit little-endian ELF file, by the names of pyelftools."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import IO, Any

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_MACHINES = {190: "EM_CUDA"}
_TYPES = {2: "SHT_SYMTAB", 8: "SHT_NOBITS"}
_KINDS = {2: "STT_FUNC"}
_COMPRESSED = 0x800


class Symbol(dict[str, Any]):
    def __init__(self, name: str, kind: int) -> None:
        super().__init__(st_info={"type": _KINDS.get(kind, kind)})
        self.name = name


class Section(dict[str, Any]):
    def __init__(self, file: ELFFile, name: str, fields: tuple[int, ...]) -> None:
        names = ("sh_type", "sh_flags", "sh_offset", "sh_size", "sh_link", "sh_entsize")
        values = [fields[i] for i in (1, 2, 4, 5, 6, 9)]
        super().__init__(zip(names, values, strict=True))
        self["sh_type"] = _TYPES.get(self["sh_type"], self["sh_type"])
        self.name, self.compressed, self._file = name, bool(self["sh_flags"] & _COMPRESSED), file

    def data(self) -> bytes:
        if self["sh_type"] == "SHT_NOBITS":
            return b""
        return self._file.content[self["sh_offset"] : self["sh_offset"] + self["sh_size"]]

    def get_symbol(self, number: int) -> Symbol:
        name, info, *_ = _SYMBOL.unpack_from(self.data(), number * _SYMBOL.size)
        return Symbol(self._file.string(self["sh_link"], name), info & 0xF)


class ELFFile(dict[str, Any]):
    """Raises struct.error, UnicodeDecodeError and ValueError for a damaged file."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.content = stream.read()
        ident, _, machine, *_ = _HEADER.unpack_from(self.content)
        if ident[:4] != b"\x7fELF" or ident[5] != 1:
            raise ValueError("no little-endian ELF file")
        self.elfclass = {1: 32, 2: 64}[ident[4]]
        start, size, count, names = (_HEADER.unpack_from(self.content)[i] for i in (6, 11, 12, 13))
        super().__init__(e_machine=_MACHINES.get(machine, machine), e_shentsize=size)
        self._names = names
        self._fields = [_SECTION.unpack_from(self.content, start + i * size) for i in range(count)]

    def string(self, section: int, at: int) -> str:
        """A name in a section of names."""
        offset, size = self._fields[section][4:6]
        end = self.content.index(b"\0", offset + at, offset + size)
        return self.content[offset + at : end].decode()

    def iter_sections(self) -> Iterator[Section]:
        for fields in self._fields:
            yield Section(self, self.string(self._names, fields[0]), fields)
