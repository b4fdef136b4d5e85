"""Heads of a projection on the host: rotated by their tokens' positions, and stored."""

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
    rotated = first * cos - second * sin
    second[...] = second * cos + first * sin
    first[...] = rotated


class HeadsStore:
    """Where the columns of a projection go: q, k and v, the heads of q and k rotated by their rows'
    positions, or pages. ``operands``: the projection's."""

    def __init__(self, problem: QkvProjectionProblem, operands: Mapping[str, Array]) -> None:
        self._problem, self._operands = problem, operands
        h = problem.heads
        counts = {"q": h.num_heads, "k": h.kv_heads, "v": h.kv_heads}
        self._heads = [(name, i) for name, count in counts.items() for i in range(count)]

    def __call__(self, y: Array, entry: int, rows: slice, columns: slice) -> None:
        """Rotate some rows and whole heads of a matrix, in place, and store them. The matrix begins
        with batch entry ``entry``."""
        h, spec, x = self._problem.heads, self._problem.spec.heads, self._operands
        entries, tokens = np.divmod(np.arange(rows.start, rows.stop), h.tokens)
        entries += entry
        positions = tokens + h.first_position
        if "positions" in x:
            positions = x["positions"][entries, tokens]
        if spec.rotary:
            cos, sin = (x[n][positions].astype(y.dtype) for n in ("cos", "sin"))
        page, row = np.divmod(positions, h.page_size)
        for column in range(columns.start, columns.stop, h.head_dim):
            name, head = self._heads[column // h.head_dim]
            of_head = y[:, column - columns.start :][:, : h.head_dim]
            if spec.rotary and name != "v":
                rotate(of_head, cos, sin, spec.rotary)
            if spec.paged and name != "q":
                x[name][x["block_table"][entries, page], head, row] = of_head
            else:
                x[name][entries, head, tokens] = of_head
