"""CDNA's MFMA of half-precision operands and of 8 bits: the emulator mixes up the rows of the large
ones, treats inf, NaN and subnormals wrongly in all, and knows 8 bits as OCP's alone, where those of
gfx942 are fnuz."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from kernelseam_rocm_emulator.patches.elements import BITS, unpack
from kernelseam_rocm_emulator.wave import Wave, bits

_NAME = re.compile(
    r"V_MFMA_F32_(16X16X(?:8|16|32)|32X32X(?:8|16))_?(F16|BF16|XF32|FP8(?=_FP8$))(?:_1K|_FP8)?$"
)


def find(word: int, name: str, family: str, arch: str) -> Callable[[Wave], None] | None:
    """Numbers of 8 bits are fnuz on gfx942."""
    match = _NAME.match(name) if family == "cdna" else None
    if match is None:
        return None
    side, _, depth = (int(x) for x in match[1].split("X"))
    return _product(word, side, depth, match[2] + "FNUZ" * (arch == "gfx942" and match[2] == "FP8"))


def _product(word: int, side: int, depth: int, kind: str) -> Callable[[Wave], None]:
    """D = A·Bᵀ + C of side × depth matrices. A lane holds consecutive elements of one row of A and
    of B; lane groups of ``side`` follow each other along K. Of D it holds four consecutive rows of
    one column at a time."""
    destination, to_accumulators, from_accumulators = (
        bits(word, 0, 8),
        bits(word, 15, 1),
        bits(word, 59, 2),
    )
    a, b, c = (bits(word, at, 9) for at in (32, 41, 50))
    if a < 256 or b < 256:
        return _refuse(f"an MFMA whose operand is no vector register (codes {a} and {b})")
    groups = 64 // side
    each = depth // groups  # elements of a lane
    count, registers = each * BITS[kind] // 32, side * side // 64
    i, lane = np.arange(registers)[:, None], np.arange(64)[None, :]
    row, column = 4 * groups * (i // 4) + 4 * (lane // side) + i % 4, lane % side

    def step(wave: Wave) -> None:
        files = (wave.vectors, wave.accumulators)
        rows = []
        for source, bank in ((a, from_accumulators & 1), (b, from_accumulators >> 1)):
            operand = unpack(files[bank][source - 256 : source - 256 + count].T, kind, True)
            rows.append(operand.reshape(groups, side, each).transpose(1, 0, 2).reshape(side, depth))
        product = rows[0] @ rows[1].T
        into = files[to_accumulators]
        held_c = into[c - 256 : c - 256 + registers] if c >= 256 else wave.scalars[c : c + 1]
        result = product[row, column] + held_c.view(np.float32)
        into[destination : destination + registers] = result.astype(np.float32).view(np.uint32)

    return step


def _refuse(what: str) -> Callable[[Wave], None]:
    def step(wave: Wave) -> None:
        raise NotImplementedError(what)

    return step
