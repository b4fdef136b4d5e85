"""Collapses any number of batch axes into the two that a descriptor has: batch and head."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.frozen import dataclass

SUMMED = None
"""C's stride along an axis over which products are summed."""


@dataclass(frozen=True)
class Axis:
    """A batch axis: its extent, and each operand's stride in elements; 0 repeats an input."""

    extent: int
    strides: Mapping[str, int | None]
    """Of A, B, C, bias, residual and scales; a bias's and a residual's count where C is not
    SUMMED."""


@dataclass(frozen=True)
class _Collapsed:
    """Several axes as one: the number of products, how many in a row share a B or a C, and the
    stride between an operand's distinct matrices."""

    extent: int
    b_group: int
    c_group: int
    strides: dict[str, int]

    def count(self, name: str) -> int:
        """An operand's number of distinct matrices."""
        groups = {"A": 1, "a_scales": 1, "B": self.b_group, "b_scales": self.b_group}
        return self.extent // groups.get(name, self.c_group)


def fold(axes: Sequence[Axis], in_order: bool = False) -> dict[str, Any] | None:
    """The fields batch, num_heads, the groups and the batch and head strides of
    ``BatchedGemmStrided``. None where no order of the axes collapses into two axes of one stride
    each, or ``in_order`` not the axes as they are. A stride is None where the operand has at most
    one entry on the axis."""
    if 0 in (a.extent for a in axes):
        return {"batch": 0}
    for batch, heads in _orders([a for a in axes if a.extent != 1], in_order):
        outer, inner = _collapse(batch, share_b=False), _collapse(heads, share_b=True)
        if outer is not None and inner is not None:
            return {
                "batch": outer.extent,
                "num_heads": inner.extent,
                "b_head_group": inner.b_group,
                "c_batch_group": outer.c_group,
                "c_head_group": inner.c_group,
                **{
                    f"stride_{name.lower()}_{which}": axis.strides.get(name, 0)
                    if axis.count(name) > 1
                    else None
                    for name in (axes[0].strides if axes else "ABC")
                    for which, axis in (("batch", outer), ("head", inner))
                },
            }
    return None


def offsets(name: str, axes: Sequence[Axis]) -> npt.NDArray[np.int64]:
    """Offsets of an operand's matrices, in elements, in row-major order of the axes."""
    result = np.zeros(1, np.int64)
    for axis in axes:
        result = np.add.outer(result, np.arange(axis.extent) * (axis.strides[name] or 0)).reshape(
            -1
        )
    return result


def _orders(
    axes: Sequence[Axis], in_order: bool
) -> Iterator[tuple[tuple[Axis, ...], tuple[Axis, ...]]]:
    """Every split of every permutation; first the axes in order, with the first as batch."""
    cuts = (1, 0, *range(2, len(axes) + 1))
    for order in [tuple(axes)] if in_order else itertools.permutations(axes):
        for cut in cuts:
            yield order[:cut], order[cut:]


def _collapse(axes: Sequence[Axis], *, share_b: bool) -> _Collapsed | None:
    """Collapse axes, outermost first, into one; None where they do not. ``share_b``: whether
    consecutive products may share a B."""
    extents = [a.extent for a in axes]
    own = len(axes)
    while own and axes[own - 1].strides["C"] is SUMMED:
        own -= 1
    if any(a.strides["C"] is SUMMED for a in axes[:own]):
        return None
    b_own = len(axes)
    if share_b:
        while b_own and not any(axes[b_own - 1].strides.get(n) for n in ("B", "b_scales")):
            b_own -= 1
        b_own = b_own or len(axes)  # a single B for all is a stride of 0
    lengths = {"A": len(axes), "a_scales": len(axes), "B": b_own, "b_scales": b_own}
    strides: dict[str, int] = {}
    for name in axes[0].strides if axes else ():
        n = lengths.get(name, own)
        step = _single_stride([(a.extent, a.strides[name] or 0) for a in axes[:n]])
        if step is None:
            return None
        strides[name] = step
    return _Collapsed(
        math.prod(extents), math.prod(extents[b_own:]), math.prod(extents[own:]), strides
    )


def _single_stride(axes: Sequence[tuple[int, int]]) -> int | None:
    """The one stride of axes (extent, stride), outermost first; None where they have none."""
    expected: int | None = None
    first = 0
    for extent, stride in reversed(axes):
        if expected is None:
            first = stride
        elif stride != expected:
            return None
        expected = stride * extent
    return first
