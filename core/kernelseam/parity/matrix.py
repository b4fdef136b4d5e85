"""The list of all cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

from kernelseam.parity.cases.attention import attention_cases
from kernelseam.parity.cases.attention_bwd import attention_bwd_cases
from kernelseam.parity.cases.cache import cache_cases
from kernelseam.parity.cases.gemm import gemm_cases
from kernelseam.parity.cases.grouped import grouped_cases
from kernelseam.parity.cases.grouped_pointers import grouped_pointers_cases
from kernelseam.parity.cases.merge import merge_cases
from kernelseam.parity.cases.projection import projection_cases
from kernelseam.parity.cases.projection_bwd import projection_bwd_cases
from kernelseam.samples.case import Case
from kernelseam.samples.operations.table import NAMES

CASES: Mapping[str, Callable[[], Sequence[Case]]] = {
    "gemm": gemm_cases,
    "grouped_gemm": grouped_cases,
    "grouped_gemm_pointers": grouped_pointers_cases,
    "attention": attention_cases,
    "attention_bwd": attention_bwd_cases,
    "merge_states": merge_cases,
    "paged_cache": cache_cases,
    **dict.fromkeys(("qkv_projection", "output_projection"), projection_cases),
    **dict.fromkeys(("qkv_projection_bwd", "output_projection_bwd"), projection_bwd_cases),
}
"""What makes the cases of an operation, and perhaps of others."""


def matrix(pattern: str = "", operation: str | None = None) -> list[Case]:
    """All cases, or those whose name contains one of the comma-separated parts of ``pattern``."""
    parts = [p.strip() for p in pattern.split(",") if p.strip()]
    return [
        c
        for name in NAMES
        if operation in (None, name)
        for c in _cases(name)
        if not parts or any(p in c.name for p in parts)
    ]


def named(name: str) -> Case:
    """The case of exactly that name; raises KeyError."""
    return _by_name()[name]


@cache
def _cases(operation: str) -> tuple[Case, ...]:
    """Cases do not change: those of an operation are made once."""
    return tuple(c for c in CASES[operation]() if c.operation == operation)


@cache
def _by_name() -> Mapping[str, Case]:
    return {c.name: c for c in matrix()}
