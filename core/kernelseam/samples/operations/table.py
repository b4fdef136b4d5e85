"""The operations by name. The module of one is imported when it is asked for: the command line asks
for one of them."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from kernelseam.samples.case import Case
from kernelseam.samples.operations.operation import Operation

_HOMES = {
    "gemm": "gemm.Gemm",
    "grouped_gemm": "grouped.Grouped",
    "grouped_gemm_pointers": "grouped_pointers.GroupedPointers",
    "attention": "attention.AttentionForward",
    "attention_bwd": "attention_bwd.AttentionGradients",
    "merge_states": "merge.Merge",
    "paged_cache": "cache.PagedCaches",
    **dict.fromkeys(
        ("qkv_projection", "output_projection", "qkv_projection_bwd", "output_projection_bwd"),
        "projection.Projection",
    ),
}
NAMES = tuple(_HOMES)
"""In the order of reports."""


@cache
def operation_named(name: str) -> Operation[Any, Any]:
    module, _, kind = _HOMES[name].partition(".")
    make = getattr(importlib.import_module(f"kernelseam.samples.operations.{module}"), kind)
    made: Operation[Any, Any] = make(name) if kind == "Projection" else make()
    return made


def operation_of(case: Case) -> Operation[Any, Any]:
    """The operation that a case is about."""
    return operation_named(case.operation)
