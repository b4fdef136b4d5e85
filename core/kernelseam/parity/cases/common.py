"""What the cases of all operations are written with: short names, walks, planted values."""

from __future__ import annotations

from dataclasses import dataclass

from kernelseam.dtypes import DType
from kernelseam.parity.cases.walk import Walk

NAN, INF = float("nan"), float("inf")
SHORT = {"f16": DType.float16, "bf16": DType.bfloat16, "f32": DType.float32, "f64": DType.float64}
"""Dtypes as the names of cases abbreviate them."""
TOKENS = Walk(order="brh")
ODD = Walk(offset=1)
UNFUSED = "gemm-softmax-gemm"
Exemptions = tuple[tuple[str, str], ...]
"""Implementations of the core's own that promise less than a case asks, each with the reason."""
LEAKS: Exemptions = (
    (
        UNFUSED,
        (
            "a hidden value has weight 0 there, and 0·NaN and 0·inf are NaN: see Edges in "
            "docs/accuracy.md"
        ),
    ),
)
"""For cases whose hidden values are not finite."""


@dataclass(frozen=True)
class Plant:
    """A value put into an operand after its data were made: [batch, head, row, column], or whatever
    its axes are, None meaning all of one."""

    operand: str
    value: float
    index: tuple[int | None, ...]
