"""What descriptors over a case's memory have in common: strides, and lists of addresses."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from kernelseam.contract import Device, Runtime
from kernelseam.parity.data.memory import Layout

_MATRIX, _PLANE = ("batch", "head", "row"), ("batch", "head", "row", "column")
_FIELDS = {
    **{
        n: (n.lower(), _MATRIX)
        for n in ("A", "B", "C", "residual", "q", "k", "v", "out", "dout", "dq", "dk", "dv")
    },
    **{n: (n, _PLANE) for n in ("bias", "mask", "dbias")},
    "lse": ("lse", ("batch", "head")),
    "alibi_slopes": ("alibi", ("batch", "head")),
    "block_table": ("table", ("row",)),
    "outs": ("outs", ("part", *_MATRIX)),
    "lses": ("lses", ("part", "batch", "head")),
}
"""Operand → how the descriptors' stride fields name it, and its axes that have one."""


def strides(layout: Layout, packed: Collection[str] = ()) -> dict[str, Any]:
    """The descriptors' stride arguments; what is packed has none of the batch."""
    return {
        f"stride_{_FIELDS[name][0]}_{axis}": stride
        for name, p in layout.places.items()
        if name in _FIELDS
        for axis, stride in zip(_FIELDS[name][1], p.strides, strict=False)
        if not (axis == "batch" and name in packed)
    }


class _DeviceList:
    """The same memory as a device's array of float64, as 64-bit integers."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {**owner.__cuda_array_interface__, "typestr": "<u8"}


def address_list(
    view: str, layout: Layout, name: str, address: int, runtime: Runtime, device: Device
) -> object:
    """The addresses of every matrix, batch-major: a host list, or an array where the runtime's say
    that they are on a device."""
    p = layout.places[name]
    starts = p.starts or [b * p.strides[0] + h * p.strides[1] for b, h in np.ndindex(*p.shape[:2])]
    found = [address + s * p.dtype.itemsize for s in starts]
    if view == "host" or not found:
        return found
    staged = runtime.from_host(np.array(found, np.uint64).view(np.float64), device)
    return _DeviceList(staged) if hasattr(staged, "__cuda_array_interface__") else found
