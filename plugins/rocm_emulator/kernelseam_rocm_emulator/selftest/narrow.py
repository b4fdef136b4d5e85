"""Self-tests of loads and stores narrower than a register: the other bits must stay."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kernelseam_rocm_emulator.selftest.instruction import (
    ALL,
    CDNA,
    RDNA,
    InstructionTest,
    U,
    Words,
    as_bytes,
    into,
)

_OFFSETS = {"u8": (0, 1, 3), "i8": (0, 1, 3), "u16": (0, 2)}
_GLOBAL = (
    # on RDNA, on CDNA, element, offset
    ("d16_b16", "short_d16", "u16", 2),
    ("d16_hi_b16", "short_d16_hi", "u16", 2),
    ("d16_u8", "ubyte_d16", "u8", 3),
    ("d16_hi_i8", "sbyte_d16_hi", "i8", 3),
)


def tests() -> Iterator[InstructionTest]:
    for kind, offsets in _OFFSETS.items():
        for upper in (False, True):
            for offset in offsets:
                name = f"{kind}_d16{'_hi' if upper else ''}"
                yield _load(
                    f"ds load {name} +{offset}",
                    ALL,
                    f"STORE_A\nDS_LOAD_{name} %0, v50 offset:{offset}\nWAIT",
                    kind,
                    offset,
                    upper,
                )
    for new, old, kind, offset in _GLOBAL:
        for name, archs in ((new, RDNA), (old, CDNA)):
            text = f"global_load_{name} %0, %4, off offset:{offset}\nWAIT"
            yield _load(f"global_load_{name}", archs, text, kind, offset, "_hi" in name)
    yield InstructionTest(
        "ds store b16_d16_hi",
        ALL,
        "STORE_A\nDS_STORE_b16_d16_hi v50, %2\nWAIT\nDS_LOAD_b32 %0, v50\nWAIT",
        lambda a, b, c, d: a & U(0xFFFF0000) | b >> U(16),
        "iiii",
    )
    yield InstructionTest(
        "ds store b8_d16_hi",
        ALL,
        "STORE_A\nDS_STORE_b8_d16_hi v50, %2 offset:1\nWAIT\nDS_LOAD_b32 %0, v50\nWAIT",
        lambda a, b, c, d: a & U(0xFFFF00FF) | (b >> U(16) & U(255)) << U(8),
        "iiii",
    )


def _load(
    name: str, archs: tuple[str, ...], text: str, kind: str, offset: int, upper: bool
) -> InstructionTest:
    def expected(a: Words, b: Words, c: Words, d: Words) -> Words:
        if kind == "u16":
            loaded = (
                np.ascontiguousarray(a).view(np.uint16).reshape(-1, 2)[:, offset // 2].astype(U)
            )
        elif kind == "u8":
            loaded = as_bytes(a)[:, offset].astype(U)
        else:
            loaded = as_bytes(a, np.int8)[:, offset].astype(np.int32).view(U) & U(0xFFFF)
        return into(d, loaded, upper)

    return InstructionTest(name, archs, text, expected, "iiii")
