"""Calls whose extents, strides and numbers were seen before, and how a `Repeat` is made of one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from kernelseam.arrays.guards import Guard, never
from kernelseam.contract import ArrayInfo
from kernelseam.ops.array_call import ArrayCall, Infos
from kernelseam.ops.on_torch import Enqueue, OnTorch
from kernelseam.ops.repeat import Repeat
from kernelseam.ops.traced_call import Function, Packed
from kernelseam.planning.binding import in_order


class KnownCall:
    """Calls of given extents, strides and numbers, at any addresses."""

    __slots__ = ("again", "function", "given", "holds", "numbers")

    def __init__(
        self, function: Function, given: tuple[Any, ...], numbers: tuple[Any, ...]
    ) -> None:
        self.function, self.given, self.numbers = function, given, numbers
        self.holds: Guard = never
        """The guard on tensors: whether they match those of such a call."""
        self.again: Callable[..., Packed | None] = self._first
        """``again(empty, zeroed, *addresses)``: as ``function.run`` with ``once``."""

    def _first(self, *given: Any) -> Packed | None:
        function, numbers, again = self.function, self.numbers, None
        if function.fixed is not None:
            with suppress(Exception):  # as of a tensor map that the driver refuses
                again = function.fixed(*numbers)
        run, once = function.run, function.once
        self.again = again or (lambda *made_by: run(once, *made_by, *numbers))
        return self.again(*given)

    def kept(self, *given: Any) -> Packed | None:
        """As ``again``, but the launches may be run any number of times."""
        return self.function.run(self.function.kept, *given, *self.numbers)


class _At:
    """A tensor of which only the address is asked for."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def repeat_of(
    known: KnownCall,
    on: OnTorch,
    made: tuple[Any, ...],
    workspace: Any,
    places_of: Mapping[str, int],
    cleared: tuple[str, ...],
    zeroes: bool,
) -> Repeat:
    """Of a call that a function served."""
    function = known.function
    if function.stages:
        workspace = None  # is copied, once for all
    layouts = [(x.shape, x.stride(), x.dtype) for x in (*made, workspace) if x is not None]
    shapes = [
        (name, partial(on.empty, tuple(shape), strides, dtype))
        for name, (shape, strides, dtype) in zip((*function.results, ""), layouts, strict=False)
    ]

    def bind(pointers: list[int], places: list[int], zeroed: int, kept: bool) -> Enqueue | None:
        at = map(_At, places)
        made_by = (lambda *layout: next(at)), (lambda size: on.zeroed(size) and zeroed)
        try:
            packed = (known.kept if kept else known.again)(*made_by, *pointers)
        except Exception:
            return None
        if packed is None:
            return None
        launches = in_order(packed[2])
        return partial(_over, packed[1], launches) if function.stages else launches

    written = [places_of[n] for n in function.written]
    return Repeat(on, tuple(shapes), bind, written, cleared, zeroes=zeroes, stages=function.stages)


def _over(memory: Any, launches: Enqueue, handle: int) -> None:
    """Run launches over memory, which lives as long as they do."""
    launches(handle)


def repeat_of_planned(
    planned: ArrayCall,
    infos: Infos,
    workspace: ArrayInfo | None,
    on: OnTorch,
    cleared: tuple[str, ...],
) -> Repeat:
    """Of a planned call, for tensors at any addresses."""
    torch: Any = sys.modules["torch"]
    made = [(r.name, infos[r.name]) for r in planned.results]
    made += [] if workspace is None else [("", workspace)]
    shapes = tuple(
        [(n, partial(on.empty, x.shape, x.strides, getattr(torch, x.dtype.value))) for n, x in made]
    )
    names, places_of = tuple(infos), len(planned.results)
    written = [names.index(n) for n in planned.written]

    def bind(pointers: list[int], places: list[int], zeroed: int, kept: bool) -> Enqueue | None:
        addresses = dict(zip(names, (*pointers, *places[:places_of]), strict=True))
        key = (planned, places[-1] if workspace is not None else 0)
        return planned.bind_addresses(addresses, key, {}).run

    return Repeat(on, shapes, bind, written, cleared, keeps=True)
