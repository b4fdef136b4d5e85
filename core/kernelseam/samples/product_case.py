"""What the cases of all products have."""

from __future__ import annotations

from dataclasses import KW_ONLY, replace
from typing import Any, Self

from kernelseam.dtypes import DType
from kernelseam.frozen import dataclass
from kernelseam.samples.common import SHORT, CommonCase


@dataclass(frozen=True)
class ProductCase(CommonCase):
    """Products as data. Field names are the descriptor's."""

    name: str
    dtype: DType
    _: KW_ONLY
    a_transposed: bool = False
    b_transposed: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    dtype_c: DType | None = None
    precision: str | None = None
    data: str = "normal"
    """"normal" N(0,1), "positive" U(0,1), "integers" −3…3 (results must agree bit for bit); of a
    batch also "tiny" or "huge" normal."""

    @classmethod
    def of(cls, prefix: str, kind: str, what: str = "", **fields: Any) -> Self:
        """A case by its name's parts. ``kind`` is DTYPE-…-XY, X and Y being n or t for A and B."""
        dtype, *_, ops = kind.split("-")
        name = "-".join(filter(None, (prefix, kind, what)))
        a, b = (x == "t" for x in ops)
        return replace(cls(name, SHORT[dtype], a_transposed=a, b_transposed=b), **fields)

    @property
    def exact(self) -> bool:
        """Whether results must equal the oracle's bit for bit."""
        return self.data == "integers"

    @property
    def judged(self) -> dict[str, Any]:
        """How results are compared, as ``oracle.check.gemm_verdict`` takes it."""
        zero_mean = self.data != "positive"
        return {"zero_mean": zero_mean, "exact": self.exact, "precision": self.precision}

    @property
    def out_dtype(self) -> DType:
        return self.dtype_c or (DType.float32 if self.dtype.is_fp8 else self.dtype)

    @property
    def product(self) -> dict[str, Any]:
        """The descriptor's fields that are those of every product."""
        shared = self.fields("a_transposed", "b_transposed", "alpha", "beta", "dtype", "precision")
        return {**shared, "dtype_c": self.out_dtype}
