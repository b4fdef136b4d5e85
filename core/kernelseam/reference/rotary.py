"""Positions of a projection's tokens: rotary embedding of their heads, and their rows in pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.descriptors.projection.problem import QkvProjectionProblem

Array = npt.NDArray[Any]


def rotate(y: Array, cos: Array, sin: Array, style: str) -> None:
    """Rotate the first columns of y [..., dim], in place, by cos and sin [..., columns / 2]."""
    half = cos.shape[-1]
    pairs = style == "pairs"
    first = y[..., 0 : 2 * half : 2] if pairs else y[..., :half]
    second = y[..., 1 : 2 * half : 2] if pairs else y[..., half : 2 * half]
    turned = first * cos - second * sin
    second[...] = second * cos + first * sin
    first[...] = turned


class Rotation:
    """x_i, x_j → x_i·cos − x_j·sin, x_j·cos + x_i·sin in rows of heads, by the rows' positions."""

    def __init__(self, problem: QkvProjectionProblem, operands: Mapping[str, Array]) -> None:
        self._problem, self._operands = problem, operands

    def positions(self, entry: int, rows: slice) -> Array:
        """The positions of some tokens of an entry."""
        if "positions" in self._operands:
            return self._operands["positions"][entry, rows]
        return np.arange(rows.start, rows.stop) + self._problem.heads.first_position

    def __call__(self, y: Array, entry: int, rows: slice) -> None:
        """Rotate the rows of some tokens of a head, in place."""
        if not self._problem.spec.heads.rotary:
            return
        at = self.positions(entry, rows)
        cos, sin = (self._operands[n][at].astype(y.dtype) for n in ("cos", "sin"))
        rotate(y, cos, sin, self._problem.spec.heads.rotary)

    def place(self, entry: int, rows: slice) -> tuple[Array, Array]:
        """(page, row in it) of some tokens."""
        page, row = np.divmod(self.positions(entry, rows), self._problem.heads.page_size)
        return self._operands["block_table"][entry, page], row
