"""Facts of a cubin, read from its ELF sections and machine code; no tool and no device needed.

Source: NVIDIA's "CUDA Binary Utilities" names the sections; attribute and opcode numbers were read off cubins beside
nvdisasm's output. Machine code is 16 bytes an instruction (Volta and later), the opcode in the lowest 12 bits.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Mapping

from kernelseam.contract import KernelFacts
from kernelseam.errors import DeviceError

_REGISTERS, _FRAME, _PARAMETER = 0x2F, 0x11, 0x17
_SIZED = 4
_MATRIX = {0x23C: "HMMA", 0x23F: "DMMA", 0x1F0: "HGMMA"}
_LOCAL = {0x387: "STL", 0x983: "LDL"}


def facts(elf: bytes) -> Mapping[str, KernelFacts]:
    """Facts by kernel. ``spills`` counts the instructions that touch local memory, ``scratch_bytes`` the stack frame."""
    if elf[:4] != b"\x7fELF" or len(elf) < 64:
        raise DeviceError("the binary is not a cubin")
    sections = dict(_sections(elf))
    symbols = _symbols(elf, sections)
    registers: dict[str, int] = {}
    frames: dict[str, int] = {}
    for attribute, data in _attributes(_content(elf, sections[".nv.info"])):
        if attribute in (_REGISTERS, _FRAME):
            index, value = struct.unpack("<II", data)
            (registers if attribute == _REGISTERS else frames)[symbols[index]] = value
    found = {}
    for name in registers:
        if f".nv.info.{name}" not in sections:
            continue  # a function that is not a kernel
        parameters = []
        for attribute, data in _attributes(_content(elf, sections[f".nv.info.{name}"])):
            if attribute == _PARAMETER:
                _, ordinal, offset, word = struct.unpack("<IHHI", data)
                parameters.append((ordinal, offset, word >> 18))
        counts = Counter(w & 0xFFF for w in _words(_content(elf, sections[f".text.{name}"])))
        shared = sections.get(f".nv.shared.{name}")
        matrix = {word: counts[code] for code, word in _MATRIX.items() if counts[code]}
        found[name] = KernelFacts(
            name, registers[name], sum(counts[c] for c in _LOCAL), frames.get(name, 0), shared[5] if shared else 0,
            sum(matrix.values()), tuple((offset, size) for _, offset, size in sorted(parameters)), matrix,
        )
    return found


def _sections(elf: bytes) -> Iterator[tuple[str, tuple[int, ...]]]:
    (table,) = struct.unpack_from("<Q", elf, 40)
    count, names = struct.unpack_from("<HH", elf, 60)
    rows = [struct.unpack_from("<IIQQQQIIQQ", elf, table + 64 * i) for i in range(count)]
    for row in rows:
        yield _string(elf, rows[names][4] + row[0]), row


def _symbols(elf: bytes, sections: Mapping[str, tuple[int, ...]]) -> list[str]:
    content, strings = _content(elf, sections[".symtab"]), sections[".strtab"][4]
    return [_string(elf, strings + struct.unpack_from("<I", content, at)[0]) for at in range(0, len(content), 24)]


def _content(elf: bytes, section: tuple[int, ...]) -> bytes:
    return elf[section[4] : section[4] + section[5]]


def _string(elf: bytes, at: int) -> str:
    return elf[at : elf.index(b"\0", at)].decode()


def _attributes(content: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(content):
        form, attribute, size = struct.unpack_from("<BBH", content, at)
        at += 4
        if form == _SIZED:
            yield attribute, content[at : at + size]
            at += size


def _words(code: bytes) -> Iterator[int]:
    for low, _ in struct.iter_unpack("<QQ", code):
        yield low
