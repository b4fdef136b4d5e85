"""The parity matrix's fixture and summary."""

from __future__ import annotations

import pytest
from compile_matrix.choice import flat
from kernelseam.parity.pytest_plugin import *  # noqa: F403
from kernelseam.samples.case import Case

TIMELY = 2000
"""Heads of an attention, which NumPy computes one after the other."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On NumPy every run takes the cases that have a field value which none before had."""
    seen: set[object] = set()
    for item in items:
        if (callspec := getattr(item, "callspec", None)) is None:
            continue
        case, target = callspec.params.get("parity_outcome", (None, None))
        if case is None or target.device.backend != "numpy":
            continue
        new = _values(case) - seen
        if case.operation == "attention" and case.batch * case.num_heads > TIMELY:
            item.add_marker(pytest.mark.slow("NumPy takes 8 s for so many heads"))
        elif new:
            seen |= new
        else:
            item.add_marker(pytest.mark.slow("NumPy had each value of its fields before"))


def _values(case: Case) -> set[object]:
    return {(type(case), *pair) for pair in flat(case) if pair[0] not in ("name", "group")}
