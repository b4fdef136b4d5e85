"""What the cases of all operations are written with: short names, walks, planted values."""

from __future__ import annotations

from typing import Any

from kernelseam.dtypes import DType
from kernelseam.frozen import dataclass
from kernelseam.samples.operand_layout import OperandLayout

NAN, INF = float("nan"), float("inf")
SHORT = {"f16": DType.float16, "bf16": DType.bfloat16, "f32": DType.float32, "f64": DType.float64}
"""Dtypes, as abbreviated in the names of cases."""
F16, BF16, F32, F64 = SHORT.values()
SHORT_8_BITS = {DType.float8_e4m3fn: "e4m3fn", DType.float8_e4m3fnuz: "e4m3fnuz"}
"""Those of 8 bits."""
TOKENS = OperandLayout(order="brh")
ODD = OperandLayout(offset=1)
UNFUSED = "gemm-softmax-gemm"
DECODE = "decode"
"""For few queries alone, on archs that have tiles for it."""
PREFIX_GROUPS = "prefix-groups"
"""Of pages that entries share, alone."""
GEMV = "gemv"
"""For products of few rows or few columns."""
Exemptions = tuple[tuple[str, str], ...]
"""(implementation of the core, reason): it does not support what the case requires, and is not
run."""
NAN_EXEMPTIONS: Exemptions = (
    (
        UNFUSED,
        (
            "a hidden value has weight 0 there, and 0·NaN and 0·inf are NaN: see Edges in "
            "docs/accuracy.md"
        ),
    ),
)
"""For cases whose masked values are not finite."""


@dataclass(frozen=True)
class InjectedValue:
    """A value written into an operand after its data are drawn. ``index``: [batch, head, row,
    column], or the operand's own axes; None means all of an axis."""

    operand: str
    value: float
    index: tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True)
class CommonCase:
    """What the cases of all operations have."""

    def fields(self, *names: str) -> dict[str, Any]:
        """Of these names, with their values."""
        return {n: getattr(self, n) for n in names}

    injected: tuple[InjectedValue, ...] = ()
    sample: int | None = None
    """The number of rows to compare, instead of all."""
    may_refuse: frozenset[str] = frozenset()
    """The core's implementations that may refuse the case; a plugin's always may, with a reason."""
    exempt: Exemptions = ()
    """The core's implementations that do not support what the case requires, each with the reason;
    they are not run."""
    group: str = ""
    """The heading in the report."""
