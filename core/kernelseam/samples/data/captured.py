"""Arrays that a case's functions capture, and those that its epilogue writes sums and maxima to:
their values and their memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kernelseam.contract import ArrayInfo, Device
from kernelseam.descriptors.common.captured import captured
from kernelseam.dtypes import DType
from kernelseam.expressions.reductions import reduction
from kernelseam.oracle.formulas import Array
from kernelseam.samples.data.memory import Layout, Placement


def inputs(arrays: Sequence[Any]) -> dict[str, Array]:
    """By operand."""
    return {captured(i): np.asarray(x) for i, x in enumerate(arrays)}


def placements(arrays: Sequence[Any]) -> dict[str, Placement]:
    """With a gap between the entries of the first axis."""
    return _placements(inputs(arrays))


def result_placements(arrays: Sequence[Any]) -> dict[str, Placement]:
    """The same of the arrays of an epilogue's sums and maxima."""
    return _placements({reduction(i): x for i, x in enumerate(arrays)})


def _placements(arrays: Mapping[str, Array]) -> dict[str, Placement]:
    result: dict[str, Placement] = {}
    for name, x in arrays.items():
        steps = tuple(math.prod(x.shape[axis + 1 :]) + (axis == 0) for axis in range(x.ndim))
        result[name] = Placement(name, DType(str(x.dtype)), x.shape, steps)
    return result


def views(
    layout: Layout, addresses: Mapping[str, Any], device: Device, name: str = "captured_"
) -> tuple[dict[str, Any], tuple[ArrayInfo, ...]]:
    """The addresses of other operands, and the arrays as they lie in the case's memory. ``name``:
    what theirs begin with."""
    found = []
    for operand, address in addresses.items():
        if operand.startswith(name):
            p = layout.placements[operand]
            found.append(ArrayInfo(address, p.shape, p.strides, p.dtype, device, "sample", None))
    others = {n: x for n, x in addresses.items() if not n.startswith(name)}
    return others, tuple(found)
