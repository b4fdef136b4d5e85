"""A batched GEMM as data."""

from __future__ import annotations

from functools import partial

from kernelseam.dtypes import DType
from kernelseam.frozen import dataclass
from kernelseam.samples.epilogues import is_of_pairs
from kernelseam.samples.operand_layout import OperandLayout
from kernelseam.samples.product_case import ProductCase


@dataclass(frozen=True)
class GemmCase(ProductCase):
    """One batched GEMM. Field names are the descriptor's."""

    M: int = 65
    N: int = 72
    K: int = 33
    batch: int = 2
    num_heads: int = 3
    b_head_group: int = 1
    c_batch_group: int = 1
    c_head_group: int = 1
    bias: DType | None = None
    residual: DType | None = None
    in_place: bool = False
    """The residual is C itself."""
    epilogue: str = ""
    """One by its name in ``samples.epilogues``, of ``kernelseam.epilogues``, or in a file."""
    preactivation: bool = False
    reductions: tuple[str, ...] = ()
    """Sums and maxima in the epilogue, behind its first part, by their names in
    ``samples.epilogues``."""
    scales: str = ""
    """Of A and B of 8 bits: "tensor", "matrices", "rows" (and columns) or "blocks"; "" none."""
    scale_block: tuple[int, int, int] | None = None
    """Rows, columns and values of k that share a scale."""
    a: OperandLayout = OperandLayout()
    b: OperandLayout = OperandLayout()
    c: OperandLayout = OperandLayout()
    bias_layout: OperandLayout = OperandLayout()
    """The bias as [batch, head, 1, column]."""
    residual_layout: OperandLayout = OperandLayout()
    preactivation_layout: OperandLayout = OperandLayout()
    view: str = "strided"
    """"strided"; or pointer lists: "host" or "device" (where the list lies)."""
    scattered: bool = False
    """Pointer lists: matrices in a random order with uneven gaps, else evenly spaced."""

    operation = "gemm"

    @property
    def columns(self) -> int:
        """Of C."""
        return self.N // 2 if is_of_pairs(self.epilogue) else self.N

    @property
    def lead(self) -> tuple[int, int]:
        """C's leading dimensions: (batches, heads)."""
        return self.batch // self.c_batch_group, self.num_heads // self.c_head_group

    @property
    def terms(self) -> int:
        """The number of products summed in an element of C."""
        return self.K * self.c_batch_group * self.c_head_group


case = partial(GemmCase.of, "gemm")
"""``kind`` is DTYPE-XY."""


TALL: dict[str, object] = {"M": 2304, "N": 136, "K": 40, "batch": 2, "num_heads": 1, "sample": 600}
"""A result of many rows of tiles, each 128 or fewer: walked in bands."""


def both(dtype: DType, **fields: object) -> dict[str, object]:
    """Fields of a case with a bias and a residual of one dtype."""
    return {"bias": dtype, "residual": dtype, **fields}
