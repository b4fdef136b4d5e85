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
    """Tests of one case follow each other: its data, which take the oracle seconds, are made once.
    JAX's are last: its threads allocate, which ends another stream's capture in the same process,
    and a capture that others end leaves its streams unusable."""
    first: dict[object, int] = {}  # by identity: not every case can be hashed
    places: dict[pytest.Item, tuple[bool, int]] = {}
    for i, item in enumerate(items):
        case = getattr(item, "callspec", None) and item.callspec.params.get("case")  # type: ignore[attr-defined]
        own = case is not None and item.path.is_relative_to(Path(__file__).parent)
        at = first.setdefault((item.path, id(case)), i) if own else i
        places[item] = item.path.name == "test_jax.py", at
    items.sort(key=places.__getitem__)
