"""RDNA's WMMA. The emulator misreads a constant C, mixes up signs and op_sel, and on gfx11
never looks at the second half of the lanes, which must hold a copy of the first."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from kernelseam_rocm_emulator.patches.elements import BITS, Numbers, half_bits, unpack
from kernelseam_rocm_emulator.wave import Wave, Words, bits

_NAME = re.compile(
    r"V_WMMA_(F32|F16|BF16|I32)_16X16X(16|32)_(F16|BF16|IU8|IU4|FP8|BF8)(?:_(FP8|BF8))?(?:_W32)?$",
    re.IGNORECASE,
)


def find(word: int, name: str, family: str) -> Callable[[Wave], None] | None:
    match = _NAME.match(name)
    if match is None:
        return None
    kinds = match[3].upper(), (match[4] or match[3]).upper()
    return _Product(word, name, match[1].upper(), int(match[2]), kinds, family == "rdna4").step


class _Product:
    """D = A·Bᵀ + C of 16 × depth matrices on 32 lanes."""

    def __init__(
        self, word: int, name: str, out: str, depth: int, kinds: tuple[str, str], spread: bool
    ) -> None:
        """``spread``: gfx12, where the two halves of the lanes hold different parts of K and packed
        results."""
        self.name, self.out, self.depth, self.kinds, self.spread = name, out, depth, kinds, spread
        self.destination, self.clamp = bits(word, 0, 8), bits(word, 15, 1)
        self.negate_high, self.select, self.negate = (
            bits(word, 8, 3),
            bits(word, 11, 3),
            bits(word, 61, 3),
        )
        self.sources = tuple(bits(word, at, 9) for at in (32, 41, 50))
        lane, r = np.arange(32), np.arange(8)[:, None]
        self.rows = 8 * (lane // 16) + r if spread else 2 * r + lane // 16
        self.columns = np.broadcast_to(lane % 16, (8, 32))

    def step(self, wave: Wave) -> None:
        a, b = self._operand(wave, 0), self._operand(wave, 1)
        result = (a @ b.T)[self.rows, self.columns] + self._addend(wave)
        v, d = wave.vectors, self.destination
        if self.out == "F32":
            v[d : d + 8] = result.astype(np.float32).view(np.uint32)
        elif self.out == "I32":
            clamped = np.clip(result, -(2**31), 2**31 - 1) if self.clamp else result
            v[d : d + 8] = (clamped & 0xFFFFFFFF).astype(np.uint32)
        else:
            self._store_half_bits(v, half_bits(result, self.out))

    def _operand(self, wave: Wave, i: int) -> Numbers:
        source, kind = self.sources[i], self.kinds[i]
        if source < 256:
            raise NotImplementedError(f"{self.name} whose operand {'AB'[i]} is no vector register")
        signed = bool(self.negate >> i & 1)
        length = self.depth // 2 if self.spread else self.depth
        words: Words = wave.vectors[source - 256 : source - 256 + length * BITS[kind] // 32].T
        values = unpack(words, kind, signed)
        if BITS[kind] == 16:  # the modifiers negate even and odd elements
            values[:, 0::2] *= -1 if signed else 1
            values[:, 1::2] *= -1 if self.negate_high >> i & 1 else 1
        if self.spread:  # any order of K will do that A and B share
            return np.concatenate([values[:16], values[16:]], 1)
        if not np.array_equal(words[:16], words[16:]):
            raise RuntimeError(
                f"{self.name}: lanes 16 to 31 of operand {'AB'[i]} (v{source - 256}) are not a "
                "copy of lanes 0 to 15"
            )
        return values[:16]

    def _addend(self, wave: Wave) -> Numbers:
        c, v = self.sources[2], wave.vectors
        if self.out == "I32":
            source = v[c - 256 : c - 248] if c >= 256 else wave.scalars[c : c + 1]
            return source.view(np.int32).astype(np.int64)
        if c < 256:
            addend: Numbers = wave.scalars[c : c + 1].view(np.float32).astype(np.float64)
        elif self.out == "F32":
            addend = v[c - 256 : c - 248].view(np.float32).astype(np.float64)
        else:
            if self.spread:
                words = np.stack([v[c - 256 + r // 2] >> np.uint32(16 * (r % 2)) for r in range(8)])
            else:
                words = v[c - 256 : c - 248] >> np.uint32(16 * (self.select >> 2 & 1))
            addend = unpack((words & np.uint32(0xFFFF)).astype(np.uint16), self.out, False)
        addend = np.abs(addend) if self.negate_high >> 2 & 1 else addend
        return -addend if self.negate >> 2 & 1 else addend

    def _store_half_bits(self, v: Words, patterns: Words) -> None:
        for r in range(8):
            register, high = (r // 2, r % 2) if self.spread else (r, self.select >> 2 & 1)
            at, old = self.destination + register, v[self.destination + register]
            if high:
                v[at] = old & np.uint32(0xFFFF) | patterns[r] << np.uint32(16)
            else:
                v[at] = old & np.uint32(0xFFFF0000) | patterns[r]
