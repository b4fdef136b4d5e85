"""A grouped GEMM over lists as data."""

from __future__ import annotations

from functools import partial

from kernelseam.frozen import dataclass
from kernelseam.samples.product_case import ProductCase

MIXED = (
    *((5, 80, 48), (0, 24, 16), (70, 1, 40), (1, 72, 8), (130, 200, 100), (33, 7, 0)),
    *((9, 0, 5), (17, 136, 260), (64, 64, 64)),
)
"""(M, N, K) of groups: empty ones, one row, one column, nothing to sum, more than a tile."""


@dataclass(frozen=True)
class GroupedPointersCase(ProductCase):
    """One grouped GEMM over lists. Field names are the descriptor's."""

    sizes: tuple[tuple[int, int, int], ...] = MIXED
    """(M, N, K) of each group."""
    aligned: bool = True
    """Whether all rows begin at multiples of 16 bytes; else groups begin anywhere, with rows whose
    strides differ."""
    view: str = "host"
    """Where the lists are: "host" or "device"."""

    operation = "grouped_gemm_pointers"


case = partial(GroupedPointersCase.of, "grouped-lists")
"""``kind`` is DTYPE-XY."""
