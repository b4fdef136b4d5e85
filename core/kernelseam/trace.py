"""Records launches: kernel, grid, block and shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernelseam.contract import LaunchRecord

_active: ContextVar[tuple[list[LaunchRecord], ...]] = ContextVar("kernelseam_trace", default=())


@contextmanager
def trace() -> Iterator[list[LaunchRecord]]:
    """Within the block, every launch of this thread (or task) is appended to the list, in order."""
    records: list[LaunchRecord] = []
    token = _active.set((*_active.get(), records))
    try:
        yield records
    finally:
        _active.reset(token)


def active() -> tuple[list[LaunchRecord], ...]:
    """The lists of the active traces, usually none."""
    return _active.get()
