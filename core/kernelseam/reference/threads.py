"""Threads that the launches of this process share.

They are started by the first launch that wants them, never at import, and end with the process. A
forked child starts its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

from kernelseam.contract import Device
from kernelseam.forking import new_lock

MOST = 16
"""Threads of one launch."""
_SERIAL = 2e6  # operations below which handing work to another thread costs more than it gains

T = TypeVar("T")
_lock = new_lock()
_helpers: ThreadPoolExecutor | None = None


def threads_for(operations: float, device: Device) -> int:
    """How many threads a launch of so many operations is worth."""
    return min(device.limits.compute_units, most_threads(operations))


def most_threads(operations: float) -> int:
    """The same on any device."""
    return MOST if operations > _SERIAL else 1


class _Tasks(Generic[T]):
    """An iterator that threads share: each task goes to one of them."""

    def __init__(self, tasks: Iterable[T]) -> None:
        self._rest = list(tasks)[::-1]

    def __iter__(self) -> Iterator[T]:
        while True:
            try:
                yield self._rest.pop()  # atomic
            except IndexError:
                return

    def drop(self) -> None:
        self._rest.clear()


def share(work: Callable[[int, Iterator[T]], None], tasks: Iterable[T], threads: int) -> None:
    """Call ``work(i, tasks)`` for each i below ``threads``, 0 on the calling thread, others where a
    helper is free. The order of tasks is that of ``tasks``; who takes which is not determined.
    Returns when all tasks are done, and raises what a call raised."""
    queue = _Tasks(tasks)
    submitted: list[Future[None]] = []
    running: list[Future[None]] = []
    try:
        if threads > 1:
            pool = _pool()
            try:
                for i in range(1, threads):
                    submitted.append(pool.submit(_help, work, i, queue))
            except RuntimeError:  # the interpreter is ending: no new threads
                pass
        work(0, iter(queue))
    finally:
        queue.drop()  # what is left where a call raised
        running = [helper for helper in submitted if not helper.cancel()]
        _finish(running)
    for helper in running:
        helper.result()


def _help(work: Callable[[int, Iterator[T]], None], thread: int, queue: _Tasks[T]) -> None:
    """A helper's part; where it fails, nobody starts another task."""
    try:
        work(thread, iter(queue))
    except BaseException:
        queue.drop()
        raise


def _finish(running: list[Future[None]]) -> None:
    """Wait for the helpers even where a signal's handler raises: they write to the caller's
    memory."""
    try:
        wait(running)
    except BaseException:
        _finish(running)
        raise


def _pool() -> ThreadPoolExecutor:
    global _helpers
    pool = _helpers
    if pool is None:
        with _lock:
            pool = _helpers = _helpers or ThreadPoolExecutor(MOST - 1, "kernelseam-numpy")
    return pool


def _forget() -> None:
    global _helpers
    _helpers = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
