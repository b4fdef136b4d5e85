"""Overlap of two strided memory regions."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernelseam.contract import OperandRule
from kernelseam.symbolic import recorded


class _Memory:
    """Strided memory as NumPy's overlap solver takes it; never read."""

    def __init__(self, pointer: int, rule: OperandRule) -> None:
        assert rule.dtype is not None
        size = rule.dtype.itemsize
        self.__array_interface__ = {
            "version": 3,
            "data": (pointer, True),
            "typestr": f"|V{size}",
            "shape": rule.shape,
            "strides": tuple(s * size for s in rule.strides),
        }


@recorded
def _apart(x: int, y: int, end_of_x: int, end_of_y: int) -> int:
    """Whether one of two ranges ends before the other begins."""
    return int(end_of_x <= y or end_of_y <= x)


def proven_overlap(x: int, a: OperandRule, y: int, b: OperandRule) -> bool:
    """Whether two strided regions provably share an element; interleaved regions do not."""
    ends = (m + r.span * (r.dtype.itemsize if r.dtype else 8) for m, r in ((x, a), (y, b)))
    if _apart(x, y, *ends):
        return False
    try:
        solve: Any = np.shares_memory  # its stub knows only the two special values of max_work
        return bool(solve(np.asarray(_Memory(x, a)), np.asarray(_Memory(y, b)), max_work=100_000))
    except np.exceptions.TooHardError:
        return False
