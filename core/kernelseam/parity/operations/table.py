"""The operations of the matrix by name."""

from __future__ import annotations

from typing import Any

from kernelseam.parity.cases.case import Case
from kernelseam.parity.cases.projection import projection_cases
from kernelseam.parity.cases.projection_bwd import projection_bwd_cases
from kernelseam.parity.operations.attention import AttentionForward
from kernelseam.parity.operations.attention_bwd import AttentionGradients
from kernelseam.parity.operations.gemm import Gemm
from kernelseam.parity.operations.merge import Merge
from kernelseam.parity.operations.operation import Operation
from kernelseam.parity.operations.projection import Projection

OPERATIONS: dict[str, Operation[Any, Any]] = {
    o.name: o
    for o in (
        Gemm(),
        AttentionForward(),
        AttentionGradients(),
        Merge(),
        Projection("qkv_projection", projection_cases),
        Projection("output_projection", projection_cases),
        Projection("qkv_projection_bwd", projection_bwd_cases),
        Projection("output_projection_bwd", projection_bwd_cases),
    )
}
"""In the order of the report."""


def operation_of(case: Case) -> Operation[Any, Any]:
    """The operation that a case is about."""
    return OPERATIONS[case.operation]
