"""Where the tokens of a projection are: their positions, the turn of their heads, their places in
pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.descriptors.projection.problem import QkvProjectionProblem

Array = npt.NDArray[Any]


class Rotation:
    """x_i, x_j → x_i·cos − x_j·sin, x_j·cos + x_i·sin in rows of heads, by the rows' positions."""

    def __init__(self, problem: QkvProjectionProblem, operands: Mapping[str, Array]) -> None:
        self._problem, self._operands = problem, operands
        h, half = problem.heads, problem.heads.rotary_dim // 2
        pairs = problem.spec.heads.rotary == "pairs"
        self._first = slice(0, h.rotary_dim, 2) if pairs else slice(0, half)
        self._second = slice(1, h.rotary_dim, 2) if pairs else slice(half, h.rotary_dim)

    def positions(self, entry: int, rows: slice) -> Array:
        """Of some tokens of an entry."""
        if "positions" in self._operands:
            return self._operands["positions"][entry, rows]
        return np.arange(rows.start, rows.stop) + self._problem.heads.first_position

    def __call__(self, y: Array, entry: int, rows: slice) -> None:
        """Turn the rows of a head of some tokens, in place."""
        if not self._problem.spec.heads.rotary:
            return
        at = self.positions(entry, rows)
        cos, sin = (self._operands[n][at].astype(y.dtype) for n in ("cos", "sin"))
        first, second = y[:, self._first].copy(), y[:, self._second].copy()
        y[:, self._first] = first * cos - second * sin
        y[:, self._second] = second * cos + first * sin

    def place(self, entry: int, rows: slice) -> tuple[Array, Array]:
        """(page, row in it) of some tokens."""
        page, row = np.divmod(self.positions(entry, rows), self._problem.heads.page_size)
        return self._operands["block_table"][entry, page], row
