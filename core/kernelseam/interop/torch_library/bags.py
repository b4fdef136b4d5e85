"""Sums of listed rows, always in the same order and in float32: torch's index_add adds halves up as
they come, and rounds after each."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import embedding_bag

from kernelseam.frozen import dataclass
from kernelseam.interop.torch_function import plain

Tensor = Any


@dataclass(frozen=True, eq=False)
class Bags:
    """Which rows are summed to each of some results."""

    indices: Tensor
    """int64: rows, those of one result side by side."""
    ends: Tensor
    """int64 [results + 1]: from which index on each has its own, and where the last one's end."""

    @classmethod
    def of(cls, places: Tensor, results: int) -> Bags:
        """``places``: of each row the result that it is added to."""
        by_place, indices = places.sort(stable=True)
        number = torch.arange(results + 1, dtype=places.dtype, device=places.device)
        return cls(indices, torch.searchsorted(by_place, number))

    def part(self, begin: int, end: int) -> Bags:
        """Of the results from one to another, for ``added``."""
        return Bags(self.indices, self.ends[begin : end + 1])

    def sums(self, x: Tensor) -> Tensor:
        """The first result's indices are the first ones, the last one's the last."""
        known, wants = plain({"x": x, "indices": self.indices, "ends": self.ends})
        if known is None or wants or x.device.type == "cpu":
            return self._by_torch(x)
        return self.added(x)

    def added(self, x: Tensor, out: Tensor | None = None, plus: Tensor | None = None) -> Tensor:
        """Sums of torch's own tensors, which nothing traces or differentiates, written to ``out``
        where that is given; with them those of ``plus`` [parts, results, columns] over its parts,
        rounded once. Where a device has a compiler by a launch of ours, several times as fast."""
        if out is None:
            out = x.new_empty(len(self.ends) - 1, x.shape[1])
        if x.device.type != "cpu":
            from kernelseam.interop.torch_library.bag_sums import launched

            if launched(x, self.indices, self.ends, out, plus):
                return out
        begin, end = self.ends[[0, -1]].tolist()
        own = Bags(self.indices[begin:end], self.ends - begin)
        if plus is None:
            return out.copy_(own._by_torch(x))
        wide = torch.promote_types(x.dtype, torch.float32)
        return out.copy_(own._by_torch(x.to(wide)) + plus.sum(0, dtype=wide))

    def _by_torch(self, x: Tensor) -> Tensor:
        """As torch traces and differentiates it."""
        if not x.numel() or len(self.ends) == 1:
            return x.new_zeros(len(self.ends) - 1, x.shape[1])
        return embedding_bag(self.indices, x, self.ends, mode="sum", include_last_offset=True)
