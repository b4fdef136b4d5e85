"""LDS: loads into one half of a register, which must leave the other half alone; stores of
accumulators, for which the emulator takes other registers; transposing reads of gfx950."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from kernelseam_rocm_emulator.wave import Wave, bits

_NAME = re.compile(r"DS_(?:LOAD|READ)_(U8|I8|U16)_D16(_HI)?$")
_STORED = re.compile(r"DS_(?:STORE|WRITE)_B(32|64|96|128)$")
_TRANSPOSED = re.compile(r"DS_(?:LOAD|READ)_B64_TR_B16$")
_TYPES: dict[str, Any] = {"U8": ctypes.c_uint8, "I8": ctypes.c_int8, "U16": ctypes.c_uint16}


def find(word: int, name: str, family: str) -> Callable[[Wave], None] | None:
    offset, address, destination = bits(word, 0, 16), bits(word, 32, 8), bits(word, 56, 8)
    accumulate = family == "cdna" and bits(word, 25, 1) == 1
    if family == "cdna" and _TRANSPOSED.match(name):
        return _transposed(offset, address, destination, accumulate)
    if accumulate and (match := _STORED.match(name)):
        return _stored(offset, address, bits(word, 40, 8), int(match[1]) // 32)
    match = _NAME.match(name)
    if match is None:
        return None
    kind, high = _TYPES[match[1]], match[2] is not None

    def step(wave: Wave) -> None:
        file = wave.accumulators if accumulate else wave.vectors
        addresses, old = wave.vectors[address].tolist(), file[destination].tolist()
        for lane in wave.active().nonzero()[0].tolist():
            value = kind.from_address(wave.shared + offset + addresses[lane]).value & 0xFFFF
            old[lane] = old[lane] & 0xFFFF | value << 16 if high else old[lane] & 0xFFFF0000 | value
        file[destination] = old

    return step


def _stored(offset: int, address: int, first: int, count: int) -> Callable[[Wave], None]:
    def step(wave: Wave) -> None:
        rows = np.ascontiguousarray(wave.accumulators[first : first + count].T)
        for lane in wave.active().nonzero()[0].tolist():
            at = wave.shared + offset + int(wave.vectors[address][lane])
            ctypes.memmove(at, rows[lane].ctypes.data, 4 * count)

    return step


def _transposed(
    offset: int, address: int, destination: int, accumulate: bool
) -> Callable[[Wave], None]:
    """16 lanes address 4 rows of 16 elements of 16 bits, 8 bytes each, row after row; lane i of
    them receives column i. Every lane takes part. Sources: AMD's guide to the instruction set of
    CDNA 4 ("interpret the data as a matrix … and transpose"); the rows and columns of a lane as
    Modular's `ds_read_tr16_b64_row` documents them."""

    def step(wave: Wave) -> None:
        if not wave.active().all():
            raise NotImplementedError("a transposing read of LDS with inactive lanes")
        file = wave.accumulators if accumulate else wave.vectors
        read = np.empty((64, 4), np.uint16)
        for lane, at in enumerate(wave.vectors[address].tolist()):
            ctypes.memmove(read[lane].ctypes.data, wave.shared + offset + at, 8)
        columns = read.reshape(4, 4, 16).transpose(0, 2, 1)  # [16 lanes, column, row]
        words = np.ascontiguousarray(columns).view(np.uint32).reshape(64, 2)
        file[destination], file[destination + 1] = words[:, 0], words[:, 1]

    return step
