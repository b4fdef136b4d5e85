"""A grouped GEMM over lists as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from kernelseam.dtypes import DType
from kernelseam.samples.common import SHORT, Exemptions, InjectedValue

MIXED = (
    *((5, 80, 48), (0, 24, 16), (70, 1, 40), (1, 72, 8), (130, 200, 100), (33, 7, 0)),
    *((9, 0, 5), (17, 136, 260), (64, 64, 64)),
)
"""(M, N, K) of groups: empty ones, one row, one column, nothing to sum, more than a tile."""


@dataclass(frozen=True)
class GroupedPointersCase:
    """One grouped GEMM over lists. Field names are the descriptor's."""

    name: str
    dtype: DType
    a_transposed: bool = False
    b_transposed: bool = False
    sizes: tuple[tuple[int, int, int], ...] = MIXED
    """(M, N, K) of each group."""
    alpha: float = 1.0
    beta: float = 0.0
    dtype_c: DType | None = None
    precision: str | None = None
    aligned: bool = True
    """Whether all rows begin at multiples of 16 bytes; else groups begin anywhere, with rows whose
    strides differ."""
    view: str = "host"
    """Where the lists are: "host" or "device"."""
    data: str = "normal"
    """"normal" N(0,1), "positive" U(0,1), "integers" −3…3 (results must agree bit for bit)."""
    injected: tuple[InjectedValue, ...] = ()
    may_refuse: frozenset[str] = frozenset()
    """The core's implementations that may refuse the case; a plugin's always may, with a reason."""
    group: str = ""
    """The heading in the report."""

    operation = "grouped_gemm_pointers"
    sample: ClassVar[int | None] = None
    exempt: ClassVar[Exemptions] = ()

    @property
    def out_dtype(self) -> DType:
        """The dtype of C."""
        return self.dtype_c or (DType.float32 if self.dtype.is_fp8 else self.dtype)


def case(kind: str, what: str = "", **fields: object) -> GroupedPointersCase:
    """``kind`` is DTYPE-XY, X and Y being n or t for A and B."""
    dtype, ops = kind.split("-")
    name = "grouped-lists-" + kind + ("-" + what if what else "")
    plain = GroupedPointersCase(name, SHORT[dtype], ops[0] == "t", ops[1] == "t")
    return replace(plain, **fields)  # type: ignore[arg-type]
