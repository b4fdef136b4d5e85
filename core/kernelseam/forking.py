"""What a forked child can go on with: locks that it finds free, values kept without a lock,
libraries at rest.

A child has the one thread that forked. A lock that another thread held at that moment would stay
held in it for good.
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
        """functools.cached_property as it is from Python 3.12 on: that of 3.11 computes under a
        lock of the class's."""

        def __init__(self, compute: Callable[[Any], Any]) -> None:
            self.compute, self.__doc__ = compute, compute.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self.name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            # found there, and not here, from now on
            value = instance.__dict__[self.name] = self.compute(instance)
            return value


__all__ = ["ForkGate", "cached_property", "new_lock"]

_locks: weakref.WeakSet[threading.Lock] = weakref.WeakSet()


def new_lock() -> threading.Lock:
    """A lock that is free in a forked child, whoever held it.

    What it guards may be half-changed there, if another thread was at it: guard what can be made
    again, or bears that.
    """
    made = threading.Lock()
    _locks.add(made)
    return made


class ForkGate:
    """Keeps forks apart from a library with locks of its own: a fork waits until no other thread is
    at work in it."""

    def __init__(self) -> None:
        # Reentrant, for a signal's handler may fork wherever its thread is.
        self._entrance, self._left = threading.RLock(), threading.Condition()
        self._inside: list[int] = []
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._shut, after_in_parent=self._open, after_in_child=self._open_in_child
            )

    @contextmanager
    def work(self) -> Iterator[None]:
        """Where the library is called. Keep it short: forks wait for its end."""
        me = threading.get_ident()
        try:
            with self._entrance:
                self._inside.append(me)
            yield
        finally:
            with self._left:
                if me in self._inside:  # else it was interrupted on its way in
                    self._inside.remove(me)
                self._left.notify_all()

    def _shut(self) -> None:
        me = threading.get_ident()  # which is not in the library now, for it forks
        self._entrance.acquire()
        with self._left:
            self._left.wait_for(lambda: all(thread == me for thread in self._inside))

    def _open(self) -> None:
        self._entrance.release()

    def _open_in_child(self) -> None:
        self._entrance, self._left = threading.RLock(), threading.Condition()


def _free() -> None:
    for lock in _locks:
        lock._at_fork_reinit()  # type: ignore[attr-defined]  # as Python's own modules do with theirs


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free)
