"""Sums of listed rows, always in the same order and in float32: torch's index_add adds halves up as
they come, and rounds after each."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import embedding_bag

from kernelseam.frozen import dataclass

Tensor = Any


@dataclass(frozen=True, eq=False)
class Bags:
    """Which rows are summed to each of some results."""

    indices: Tensor
    """int64: rows, those of one result side by side."""
    ends: Tensor
    """int64 [results + 1]: from which index on each has its own, and the number of indices."""

    @classmethod
    def of(cls, places: Tensor, results: int) -> Bags:
        """``places``: of each row the result that it is added to."""
        by_place, indices = places.sort(stable=True)
        number = torch.arange(results + 1, dtype=places.dtype, device=places.device)
        return cls(indices, torch.searchsorted(by_place, number))

    def sums(self, x: Tensor) -> Tensor:
        if not x.numel() or len(self.ends) == 1:
            return x.new_zeros(len(self.ends) - 1, x.shape[1])
        return embedding_bag(self.indices, x, self.ends, mode="sum", include_last_offset=True)
