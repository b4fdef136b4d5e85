"""Whether two strided walks share memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernelseam.contract import OperandRule


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


def proven_overlap(x: int, a: OperandRule, y: int, b: OperandRule) -> bool:
    """Whether two strided memories provably share an element; interleaved ones do not."""
    if (
        x + a.span * (a.dtype.itemsize if a.dtype else 8) <= y
        or y + b.span * (b.dtype.itemsize if b.dtype else 8) <= x
    ):
        return False
    try:
        solve: Any = np.shares_memory  # its stub knows only the two special values of max_work
        return bool(solve(np.asarray(_Memory(x, a)), np.asarray(_Memory(y, b)), max_work=100_000))
    except np.exceptions.TooHardError:
        return False
