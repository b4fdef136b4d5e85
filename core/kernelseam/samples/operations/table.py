"""The operations by name."""

from __future__ import annotations

from typing import Any

from kernelseam.samples.case import Case
from kernelseam.samples.operations.attention import AttentionForward
from kernelseam.samples.operations.attention_bwd import AttentionGradients
from kernelseam.samples.operations.cache import PagedCaches
from kernelseam.samples.operations.gemm import Gemm
from kernelseam.samples.operations.grouped import Grouped
from kernelseam.samples.operations.grouped_pointers import GroupedPointers
from kernelseam.samples.operations.merge import Merge
from kernelseam.samples.operations.operation import Operation
from kernelseam.samples.operations.projection import Projection

OPERATIONS: dict[str, Operation[Any, Any]] = {
    o.name: o
    for o in (
        Gemm(),
        Grouped(),
        GroupedPointers(),
        AttentionForward(),
        AttentionGradients(),
        Merge(),
        PagedCaches(),
        Projection("qkv_projection"),
        Projection("output_projection"),
        Projection("qkv_projection_bwd"),
        Projection("output_projection_bwd"),
    )
}
"""In the order of reports."""


def operation_of(case: Case) -> Operation[Any, Any]:
    """The operation that a case is about."""
    return OPERATIONS[case.operation]
