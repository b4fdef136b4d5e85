"""Arrays that a case's functions capture: their values and their memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kernelseam.contract import ArrayInfo, Device
from kernelseam.descriptors.common.captured import captured
from kernelseam.dtypes import DType
from kernelseam.oracle.formulas import Array
from kernelseam.samples.data.memory import Layout, Placement


def inputs(arrays: Sequence[Any]) -> dict[str, Array]:
    """By operand."""
    return {captured(i): np.asarray(x) for i, x in enumerate(arrays)}


def placements(arrays: Sequence[Any]) -> dict[str, Placement]:
    """With a gap between the entries of the first axis."""
    result: dict[str, Placement] = {}
    for name, x in inputs(arrays).items():
        steps = tuple(math.prod(x.shape[axis + 1 :]) + (axis == 0) for axis in range(x.ndim))
        result[name] = Placement(name, DType(str(x.dtype)), x.shape, steps)
    return result


def views(
    layout: Layout, addresses: Mapping[str, Any], device: Device
) -> tuple[dict[str, Any], tuple[ArrayInfo, ...]]:
    """The addresses of other operands, and the arrays as they lie in the case's memory."""
    found = []
    for name, address in addresses.items():
        if name.startswith("captured_"):
            p = layout.placements[name]
            found.append(ArrayInfo(address, p.shape, p.strides, p.dtype, device, "sample", None))
    others = {n: x for n, x in addresses.items() if not n.startswith("captured_")}
    return others, tuple(found)
