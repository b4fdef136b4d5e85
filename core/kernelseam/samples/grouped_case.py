"""A grouped GEMM as data."""

from __future__ import annotations

from itertools import accumulate

from kernelseam.frozen import dataclass
from kernelseam.samples.epilogues import is_of_pairs
from kernelseam.samples.product_case import ProductCase

SKEWED = (5, 0, 70, 1, 130, 0, 17)
"""Sizes of groups: empty ones, one of a row, more than a tile, none of them a multiple of 8."""


@dataclass(frozen=True)
class GroupedCase(ProductCase):
    """One grouped GEMM. Field names are the descriptor's."""

    along: str = "m"
    sizes: tuple[int, ...] = SKEWED
    """Of the groups along ``along``."""
    rest: int = 0
    """Of the capacity, behind the last group."""
    M: int = 72
    """This and the next two are not looked at where they are the grouped axis."""
    N: int = 80
    K: int = 48
    scales: str = ""
    """Of A and B of 8 bits: "tensor", "rows" (and columns) or "blocks"; "" none."""
    scale_block: tuple[int, int, int] | None = None
    indices: tuple[str, ...] = ()
    """Of "a_indices", "c_indices" and "c_factors": those that are given."""
    a_rows: int = 90
    """Of A, where a_indices say which are multiplied."""
    gap: int = 0
    """Elements left free after every row."""
    tight: bool = False
    """Rows lie next to each other; else each begins at a multiple of 16 bytes."""
    epilogue: str = ""
    """One by its name in ``samples.epilogues``, or of ``kernelseam.epilogues``."""
    preactivation: bool = False
    """Whether what the epilogue is of is written too."""

    operation = "grouped_gemm"

    @property
    def offsets(self) -> tuple[int, ...]:
        """The end of each group."""
        return tuple(accumulate(self.sizes))

    @property
    def end(self) -> int:
        """Of the last group."""
        return sum(self.sizes)

    @property
    def extents(self) -> dict[str, int]:
        """M, N and K, the grouped one with its rest."""
        given = {"m": self.M, "n": self.N, "k": self.K}
        return {**given, self.along: self.end + self.rest}

    def columns(self, n: int) -> int:
        """Of C, where the product has n: half as many where the epilogue is of pairs."""
        return n // 2 if is_of_pairs(self.epilogue) else n

    @property
    def terms(self) -> int:
        """The most products that are summed in an element of C."""
        return max(self.sizes, default=0) if self.along == "k" else self.K


def case(kind: str, what: str = "", **fields: object) -> GroupedCase:
    """``kind`` is DTYPE-AXIS-XY."""
    return GroupedCase.of("grouped-gemm", kind, what, along=kind.split("-")[1], **fields)
