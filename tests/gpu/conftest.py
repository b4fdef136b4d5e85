"""What tests on a GPU share: helpers of their own, and those of the unit tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path[:0] = [
    str(Path(__file__).parent / "helpers"),
    str(Path(__file__).parents[1] / "unit" / "helpers"),
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """JAX's last: its threads allocate, which ends another stream's capture in the same process,
    and a capture that others end leaves its streams unusable."""
    items.sort(key=lambda item: item.path.name == "test_jax.py")
