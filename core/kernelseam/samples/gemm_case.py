"""A batched GEMM as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from kernelseam.dtypes import DType
from kernelseam.samples.common import SHORT, Exemptions, InjectedValue
from kernelseam.samples.epilogues import PAIRS
from kernelseam.samples.operand_layout import OperandLayout


@dataclass(frozen=True)
class GemmCase:
    """One batched GEMM. Field names are the descriptor's."""

    name: str
    dtype: DType
    a_transposed: bool = False
    b_transposed: bool = False
    M: int = 65
    N: int = 72
    K: int = 33
    batch: int = 2
    num_heads: int = 3
    alpha: float = 1.0
    beta: float = 0.0
    b_head_group: int = 1
    c_batch_group: int = 1
    c_head_group: int = 1
    dtype_c: DType | None = None
    bias: DType | None = None
    residual: DType | None = None
    in_place: bool = False
    """The residual is C itself."""
    precision: str | None = None
    epilogue: str = ""
    """One by its name in ``samples.epilogues``, of ``kernelseam.epilogues``, or in a file."""
    preactivation: bool = False
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
    data: str = "normal"
    """"normal" N(0,1), "positive" U(0,1), "integers" −3…3 (results must agree bit for bit), "tiny"
    or "huge" normal."""
    injected: tuple[InjectedValue, ...] = ()
    sample: int | None = None
    """The number of rows to compare, instead of all."""
    may_refuse: frozenset[str] = frozenset()
    """The core's implementations that may refuse the case; a plugin's always may, with a reason."""
    group: str = ""
    """The heading in the report."""

    operation = "gemm"
    exempt: ClassVar[Exemptions] = ()

    @property
    def out_dtype(self) -> DType:
        """The dtype of C."""
        return self.dtype_c or (DType.float32 if self.dtype.is_fp8 else self.dtype)

    @property
    def columns(self) -> int:
        """Of C."""
        return self.N // 2 if self.epilogue in PAIRS else self.N

    @property
    def lead(self) -> tuple[int, int]:
        """C's leading dimensions: (batches, heads)."""
        return self.batch // self.c_batch_group, self.num_heads // self.c_head_group

    @property
    def terms(self) -> int:
        """The number of products summed in an element of C."""
        return self.K * self.c_batch_group * self.c_head_group

    @property
    def exact(self) -> bool:
        """Whether results must equal the oracle's bit for bit."""
        return self.data == "integers"


def case(kind: str, what: str = "", **fields: object) -> GemmCase:
    """``kind`` is DTYPE-XY, X and Y being n or t for A and B."""
    dtype, ops = kind.split("-")
    name = "gemm-" + kind + ("-" + what if what else "")
    plain = GemmCase(name, SHORT[dtype], ops[0] == "t", ops[1] == "t")
    return replace(plain, **fields)  # type: ignore[arg-type]


TALL: dict[str, object] = {"M": 2304, "N": 136, "K": 40, "batch": 2, "num_heads": 1, "sample": 600}
"""A result of many rows of tiles, each 128 or fewer: walked in bands."""


def both(dtype: DType, **fields: object) -> dict[str, object]:
    """Fields of a case with a bias and a residual of one dtype."""
    return {"bias": dtype, "residual": dtype, **fields}
