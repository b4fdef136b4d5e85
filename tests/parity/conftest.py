"""The parity matrix's fixture and summary."""

from __future__ import annotations

import pytest
from kernelseam.parity.pytest_plugin import *  # noqa: F403

TIMELY = 2000
"""Heads of an attention, which NumPy computes one after the other."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (callspec := getattr(item, "callspec", None)) is None:
            continue
        case, target = callspec.params.get("parity_outcome", (None, None))
        if (
            case is not None
            and case.operation == "attention"
            and target.device.backend == "numpy"
            and case.batch * case.num_heads > TIMELY
        ):
            item.add_marker(pytest.mark.slow("NumPy takes 8 s for so many heads"))
