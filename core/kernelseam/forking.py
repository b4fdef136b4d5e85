"""Fork safety: locks that are free in a forked child, cached values without locks, and libraries
that no other thread is using at the fork.

A forked child has only the thread that forked. A lock that another thread held would stay locked in
the child for ever.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property
else:

    class cached_property:
        """functools.cached_property of Python 3.12; that of 3.11 holds a lock of the class while it
        computes."""

        def __init__(self, compute: Callable[[Any], Any]) -> None:
            self.compute, self.__doc__ = compute, compute.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self.name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            # later look-ups find it there
            value = instance.__dict__[self.name] = self.compute(instance)
            return value


__all__ = ["ForkGate", "cached_property", "new_lock"]

_locks: weakref.WeakSet[threading.Lock] = weakref.WeakSet()


def new_lock() -> threading.Lock:
    """A lock that is free in a forked child, even where another thread held it at the fork.

    In the child, the guarded data may be partly changed: use it for data that tolerate that, such
    as caches.
    """
    lock = threading.Lock()
    _locks.add(lock)
    return lock


class ForkGate:
    """Delays forks while other threads are inside a library that has locks of its own."""

    def __init__(self) -> None:
        # Reentrant: a signal handler may fork at any point of its thread.
        self._entrance, self._left = threading.RLock(), threading.Condition()
        self._inside: list[int] = []
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._shut, after_in_parent=self._open, after_in_child=self._open_in_child
            )

    @contextmanager
    def work(self) -> Iterator[None]:
        """Call the library within this block. Keep it short: forks wait for its end."""
        me = threading.get_ident()
        try:
            with self._entrance:
                self._inside.append(me)
            yield
        finally:
            with self._left:
                if me in self._inside:  # else it was interrupted while entering
                    self._inside.remove(me)
                self._left.notify_all()

    def _shut(self) -> None:
        me = threading.get_ident()  # it is forking, so it is not in the library
        self._entrance.acquire()
        with self._left:
            self._left.wait_for(lambda: all(thread == me for thread in self._inside))

    def _open(self) -> None:
        self._entrance.release()

    def _open_in_child(self) -> None:
        self._entrance, self._left = threading.RLock(), threading.Condition()


def _release_all() -> None:
    for lock in _locks:
        lock._at_fork_reinit()  # type: ignore[attr-defined]  # as Python's own modules do with theirs


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_all)
