"""What Python's allocators, NumPy's among them, held at most during a call."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def peak_of(run: Callable[[], T]) -> tuple[T, int]:
    """Its result, and bytes above what was there before."""
    tracemalloc.start()
    try:
        result = run()
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
