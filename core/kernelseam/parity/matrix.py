"""The list of all cases."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from kernelseam.parity.cases.case import Case
from kernelseam.parity.operations.table import OPERATIONS


def matrix(pattern: str = "", operation: str | None = None) -> list[Case]:
    """All cases, or those whose name contains one of the comma-separated parts of ``pattern``."""
    parts = [p.strip() for p in pattern.split(",") if p.strip()]
    return [
        c
        for o in OPERATIONS.values()
        if operation in (None, o.name)
        for c in _cases(o.name)
        if not parts or any(p in c.name for p in parts)
    ]


def named(name: str) -> Case:
    """The case of exactly that name; raises KeyError."""
    return _by_name()[name]


@cache
def _cases(operation: str) -> tuple[Case, ...]:
    """Cases do not change: those of an operation are made once."""
    return tuple(OPERATIONS[operation].cases())


@cache
def _by_name() -> Mapping[str, Case]:
    return {c.name: c for c in matrix()}
