"""Any number of axes that products run over, as the two that a descriptor has: batch and head."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

SUMMED = None
"""The stride of C along an axis over which products are summed."""


@dataclass(frozen=True)
class Axis:
    """Entries that products run over, and the elements from one to the next by operand: 0 repeats
    an input."""

    extent: int
    strides: Mapping[str, int | None]
    """Of A, B and C, and of what is added to C, which counts where C is not summed."""


@dataclass(frozen=True)
class _Slot:
    """One axis of the descriptor: how many products, how many of them share a B or one C, and a
    stride for each operand's own entries."""

    extent: int
    b_group: int
    c_group: int
    strides: dict[str, int]

    def count(self, name: str) -> int:
        """Entries that an operand has."""
        return self.extent // {"A": 1, "B": self.b_group}.get(name, self.c_group)


def fold(axes: Sequence[Axis]) -> dict[str, Any] | None:
    """batch, num_heads, the groups and the batch and head strides of ``BatchedGemmStrided``; None
    where no order of the axes gives two that step evenly. Strides of an operand's axes of at most
    one entry are None."""
    if 0 in (a.extent for a in axes):
        return {"batch": 0}
    for batch, heads in _orders([a for a in axes if a.extent != 1]):
        outer, inner = _slot(batch, shares=False), _slot(heads, shares=True)
        if outer is not None and inner is not None:
            return {
                "batch": outer.extent,
                "num_heads": inner.extent,
                "b_head_group": inner.b_group,
                "c_batch_group": outer.c_group,
                "c_head_group": inner.c_group,
                **{
                    f"stride_{name.lower()}_{which}": slot.strides.get(name, 0)
                    if slot.count(name) > 1
                    else None
                    for name in (axes[0].strides if axes else "ABC")
                    for which, slot in (("batch", outer), ("head", inner))
                },
            }
    return None


def offsets(name: str, axes: Sequence[Axis]) -> npt.NDArray[np.int64]:
    """Elements from an operand's first entry to each that the axes run over, the last axis
    fastest."""
    found = np.zeros(1, np.int64)
    for axis in axes:
        found = np.add.outer(found, np.arange(axis.extent) * (axis.strides[name] or 0)).reshape(-1)
    return found


def _orders(axes: Sequence[Axis]) -> Iterator[tuple[tuple[Axis, ...], tuple[Axis, ...]]]:
    """Every order and every cut, the given order first, its first axis the batch."""
    cuts = (1, 0, *range(2, len(axes) + 1))
    for order in itertools.permutations(axes):
        for cut in cuts:
            yield order[:cut], order[cut:]


def _slot(axes: Sequence[Axis], *, shares: bool) -> _Slot | None:
    """Axes, outermost first, as one. ``shares``: whether several products in a row may have one
    B."""
    extents = [a.extent for a in axes]
    own = len(axes)
    while own and axes[own - 1].strides["C"] is SUMMED:
        own -= 1
    if any(a.strides["C"] is SUMMED for a in axes[:own]):
        return None
    b_own = len(axes)
    if shares:
        while b_own and axes[b_own - 1].strides["B"] == 0:
            b_own -= 1
        b_own = b_own or len(axes)  # one B for all is a stride of 0
    lengths = {"A": len(axes), "B": b_own}
    strides: dict[str, int] = {}
    for name in axes[0].strides if axes else ():
        n = lengths.get(name, own)
        step = _merged([(a.extent, a.strides[name] or 0) for a in axes[:n]])
        if step is None:
            return None
        strides[name] = step
    return _Slot(math.prod(extents), math.prod(extents[b_own:]), math.prod(extents[own:]), strides)


def _merged(axes: Sequence[tuple[int, int]]) -> int | None:
    """The one stride of axes (extent, stride), outermost first, that step evenly; else None."""
    run: int | None = None
    first = 0
    for extent, stride in reversed(axes):
        if run is None:
            first = stride
        elif stride != run:
            return None
        run = stride * extent
    return first
