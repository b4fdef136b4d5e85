"""Block lists as words of bits, and as bools."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.expressions.blocks import WORD

Array = npt.NDArray[Any]


def packed(states: Array) -> Array:
    """Words [..., words, 2] of bools [..., block columns, 2]."""
    *outer, columns, planes = states.shape
    bits = np.zeros((*outer, -(-columns // WORD) * WORD, planes), np.uint32)
    bits[..., :columns, :] = states
    shifts = np.arange(WORD, dtype=np.uint32)[:, None]
    spread = bits.reshape(*outer, -1, WORD, planes) << shifts
    joined: Array = np.bitwise_or.reduce(spread, axis=-2)
    return joined.view(np.int32)


def unpacked(words: Array, columns: int) -> Array:
    """Bools [..., block columns, 2] of words."""
    shifts = np.arange(WORD, dtype=np.int32)[:, None]
    bits = (words[..., :, None, :] >> shifts) & 1
    return bits.reshape(*words.shape[:-2], -1, 2)[..., :columns, :].astype(np.bool_)
