"""Sums of gradients over a rank's calls. Terms are kept as they come, and added once the sum is
asked for: nothing is cleared or converted before."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from kernelseam.distributed.partials import deepest, wider

Tensor = Any
_TERMS = 4
"""That are kept of the same rows; more are added in between."""


class Sum:
    """[B, H, S, D] of terms that have some of the rows each. Sums are in float32 (float64 of
    float64), rounded where they are asked for."""

    def __init__(self, like: Tensor) -> None:
        self._like, self._terms = like, list[tuple[int, Tensor]]()

    def add(self, begin: int, x: Tensor) -> None:
        """Rows from ``begin`` on. x is kept."""
        self._terms.append((begin, x))
        if deepest((a, y.shape[2]) for a, y in self._terms) > _TERMS:
            self._terms = [(0, self.result(wider(self._like.dtype)))]

    def result(self, dtype: Any) -> Tensor:
        """The sum, contiguous; may be the only term itself."""
        rows = self._like.shape[2]
        if len(self._terms) == 1:
            _, x = self._terms[0]
            if x.shape[2] == rows and x.dtype == dtype:
                return x.contiguous()
        out = torch.empty(self._like.shape, dtype=dtype, device=self._like.device)
        spans = [(begin, begin + x.shape[2]) for begin, x in self._terms]
        ends = sorted({0, rows, *(end for span in spans for end in span)})
        for begin, end in pairwise(ends):
            write_sum(
                out[:, :, begin:end],
                [
                    x[:, :, begin - a : end - a]
                    for (a, x), (_, b) in zip(self._terms, spans, strict=True)
                    if a <= begin and end <= b
                ],
            )
        return out


def write_sum(to: Tensor, terms: Sequence[Tensor]) -> None:
    """The sum, in float32 (float64 of float64), rounded once."""
    if not terms:
        to.zero_()
        return
    *before, last = terms
    if not before:
        to.copy_(last)
        return
    total, *between = before
    wide = wider(to.dtype)
    # Two that are rounded alike need no sum in between.
    if between or torch.promote_types(total.dtype, last.dtype) not in (to.dtype, wide):
        total = total.to(wide, copy=True)
    for x in between:
        total += x
    torch.add(total, last, out=to)
