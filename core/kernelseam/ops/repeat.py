"""Calls on torch tensors like an earlier one, at the same or other addresses."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from kernelseam.arrays.guards import Guard
from kernelseam.arrays.torch import clear
from kernelseam.ops.array_call import put
from kernelseam.ops.on_torch import Enqueue, OnTorch
from kernelseam.ops.split import picked

ALIGNMENT = 16
"""Bytes: of every address, where launches are bound to it without being checked."""
_MOST_PLACES = 16


class Repeat:
    """Repeats a call: results are allocated, and bound launches are cached by all addresses."""

    __slots__ = (
        "_bind",
        "_bound",
        "_cleared",
        "_keeps",
        "_on",
        "_shapes",
        "_stages",
        "_written",
        "_zeroes",
        "guards",
    )

    def __init__(
        self,
        on: OnTorch,
        shapes: tuple[tuple[str, Callable[[], Any]], ...],
        bind: Callable[[list[int], list[int], int, bool], Enqueue | None],
        written: list[int],
        cleared: tuple[str, ...],
        keeps: bool = False,
        zeroes: bool = False,
        stages: bool = False,
    ) -> None:
        """``shapes``: the results' names and allocators, and last, with an empty name, the
        workspace's. ``bind(pointers, places, zeroed, kept)``: the launches over the tensors'
        addresses, over those of results and workspace and over zeroed memory, to run once or, where
        ``kept``, any number of times; None where the call must be planned. ``keeps``: ``kept`` is
        always possible. ``zeroes``: they need the stream's zeroed memory. ``stages``: they read
        what torch's current stream copies to the device. ``written``: indices of the tensors that
        are written. ``cleared``: results that are set to 0 first."""
        self._on, self._shapes, self._bind = on, shapes, bind
        self._written = picked(written)
        self._cleared, self._keeps, self._zeroes = cleared, keeps, zeroes
        self._stages = stages
        self._bound: dict[Hashable, Enqueue | None] = {}
        self.guards: tuple[Guard, ...] = ()
        """On tensors and torch's modes, each of calls that it served; the latest first."""

    def call(
        self,
        tensors: tuple[Any, ...],
        pointers: list[int],
        stream: object,
        is_current: bool = False,
    ) -> dict[str, Any] | None:
        """The results by name; None, with nothing launched, where it cannot be repeated.
        ``is_current``: the device was made current."""
        on, zeroed = self._on, 0
        if not (is_current or on.is_current()):
            return on.within(self.call, tensors, pointers, stream, True)
        if self._zeroes and not (stream is None and (zeroed := on.zeroed(0))):
            return None
        if self._stages:
            if stream is not None or on.captures():
                return None
            zeroed = on.stream()  # what was copied on a stream is read on it
            if 0 < zeroed < 3:  # stands for a stream of each thread
                return None
        results: dict[str, Any] = {}
        workspace, places = None, []
        try:
            for name, allocate in self._shapes:
                x = allocate()
                places.append(x.data_ptr())
                if name:
                    results[name] = x
                else:
                    workspace = x
        except Exception:  # the planned call allocates again and raises the proper error
            return None
        key = (zeroed, *pointers, *places)
        launches = self._bound.get(key)
        if launches is None:
            # (what is staged has its addresses checked, and an empty result has none)
            if not self._stages and any(not x or x % ALIGNMENT for x in places):
                return None
            # Results that move are packed for once, until they come back to a place.
            kept = self._keeps or not places or key in self._bound
            launches = self._bind(pointers, places, zeroed, kept)
            if launches is None:
                return None
            put(self._bound, key, launches if kept else None, _MOST_PLACES)
        if self._cleared:
            clear([results[name] for name in self._cleared if name in results])
        if stream is None:
            launches(on.stream())
        else:
            on.launch(launches, workspace, stream)
        if self._written:
            on.count_writes(self._written(tensors))
        return results
