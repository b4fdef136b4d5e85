"""Counting instructions of a code object, through the disassembler of the compiler library (comgr)
that built it."""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from kernelseam_rocm.codeobject import CodeObject

_READ = ctypes.CFUNCTYPE(
    ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p
)
_PRINT = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_void_p)
_ADDRESS = ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_void_p)

_PATTERNS = {
    "matrix_instructions": re.compile(r"v_(s?mfmac?|s?wmmac?)_"),
    "scratch_instructions": re.compile(r"scratch_|buffer_(load|store)_\w+ .*\bs32\b"),
    "shared_instructions": re.compile(r"ds_(read|write|load|store)"),
    "wide_shared_instructions": re.compile(r"ds_(read|write|load|store)_b128"),
    "global_instructions": re.compile(r"(global|flat|buffer)_(load|store)"),
    "flat_instructions": re.compile(r"flat_(load|store|atomic)"),
    "wide_global_instructions": re.compile(r"(global|flat|buffer)_(load|store)_(dwordx4|b128)"),
}


@cache
def library() -> Any | None:
    """comgr, by the path under which it is loaded already, else by name; None where there is
    none."""
    for name in (
        *loaded_libraries("libamd_comgr.so"),
        "libamd_comgr.so",
        "libamd_comgr.so.3",
        "libamd_comgr.so.2",
    ):
        try:
            loaded = ctypes.CDLL(name)
            loaded.amd_comgr_create_disassembly_info.argtypes = [
                ctypes.c_char_p,
                _READ,
                _PRINT,
                _ADDRESS,
                ctypes.POINTER(ctypes.c_uint64),
            ]
            loaded.amd_comgr_disassemble_instruction.argtypes = [
                ctypes.c_uint64,
                ctypes.c_uint64,
                ctypes.c_void_p,
                ctypes.POINTER(ctypes.c_uint64),
            ]
            loaded.amd_comgr_destroy_disassembly_info.argtypes = [ctypes.c_uint64]
            return loaded
        except (OSError, AttributeError):
            continue
    return None


def loaded_libraries(name: str) -> list[str]:
    """Paths of the libraries of that name in this process."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    return sorted({line.split()[-1] for line in maps.splitlines() if f"/{name}" in line})


def instructions(code: CodeObject, kernel: str, handle: Callable[[int, str], None]) -> bool:
    """Hand every instruction of a kernel to ``handle``: its virtual address and its text. Whether
    they could be read."""
    comgr = library()
    if comgr is None:
        return False
    start, text = code.code[kernel]
    end, at = start + len(text), start

    def read(address: int, into: int, size: int, _: int) -> int:
        n = max(0, min(size, end - address))
        ctypes.memmove(into, text[address - start : address - start + n], n)
        return n

    callbacks = (
        _READ(read),
        _PRINT(lambda s, _: handle(at, s.decode().strip())),
        _ADDRESS(lambda a, _: None),
    )
    info = ctypes.c_uint64()
    if comgr.amd_comgr_create_disassembly_info(
        code.target.encode(), *callbacks, ctypes.byref(info)
    ):
        return False
    try:
        size = ctypes.c_uint64()
        while at < end:
            failed = comgr.amd_comgr_disassemble_instruction(info, at, None, ctypes.byref(size))
            at += 4 if failed or not size.value else size.value  # data between instructions
    finally:
        comgr.amd_comgr_destroy_disassembly_info(info)
    return True


def count(code: CodeObject) -> Mapping[str, Mapping[str, int]]:
    """By kernel, how many instructions of each kind of `_PATTERNS` it has; empty where nothing can
    disassemble. comgr may end the process: see `compiler`."""
    result: dict[str, Mapping[str, int]] = {}
    for kernel in code.code:
        counts: Counter[str] = Counter(dict.fromkeys(_PATTERNS, 0))

        def tally(_: int, instruction: str, counts: Counter[str] = counts) -> None:
            for key, pattern in _PATTERNS.items():
                if pattern.match(instruction):
                    counts[key] += 1

        result[kernel] = dict(counts) if instructions(code, kernel, tally) else {}
    return result
