"""Descriptors over a case's memory: stride arguments and pointer lists."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from kernelseam.contract import Device, Runtime
from kernelseam.samples.data.memory import Layout

_MATRIX, _PLANE = ("batch", "head", "row"), ("batch", "head", "row", "column")
_FIELDS = {
    **{
        n: (n.lower(), _MATRIX)
        for n in ("A", "B", "C", "residual", "q", "k", "v", "out", "dout", "dq", "dk", "dv")
    },
    **{n: (n, _PLANE) for n in ("bias", "mask", "dbias")},
    "preactivation": ("preactivation", _MATRIX),
    "lse": ("lse", ("batch", "head")),
    "alibi_slopes": ("alibi", ("batch", "head")),
    **{n: (n, ("batch", "head", "block")) for n in ("q_scales", "k_scales", "v_scales")},
    "a_scales": ("a_scales", (*_MATRIX, "k")),
    "b_scales": ("b_scales", ("batch", "head", "column", "k")),
    "block_table": ("table", ("row",)),
    "outs": ("outs", ("part", *_MATRIX)),
    "lses": ("lses", ("part", "batch", "head")),
}
"""Operand → its name in the descriptors' stride fields, and the axes that have one."""


def strides(layout: Layout, packed: Collection[str] = ()) -> dict[str, Any]:
    """The descriptors' stride arguments; ``packed`` operands have no batch stride."""
    return {
        f"stride_{_FIELDS[name][0]}_{axis}": stride
        for name, p in layout.placements.items()
        if name in _FIELDS
        for axis, stride in zip(_FIELDS[name][1], p.strides, strict=False)
        if not (axis == "batch" and name in packed)
    }


class _DeviceList:
    """A float64 device array's memory viewed as uint64."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {**owner.__cuda_array_interface__, "typestr": "<u8"}


def address_list(
    view: str, layout: Layout, name: str, address: int, runtime: Runtime, device: Device
) -> object:
    """The address of every matrix, batch-major, as ``listed``."""
    p = layout.placements[name]
    starts = p.starts or [b * p.strides[0] + h * p.strides[1] for b, h in np.ndindex(*p.shape[:2])]
    return listed(view, [address + s * p.dtype.itemsize for s in starts], runtime, device)


def listed(view: str, addresses: list[int], runtime: Runtime, device: Device) -> object:
    """A list on the host, or a device array where the runtime's arrays support
    __cuda_array_interface__."""
    if view == "host" or not addresses:
        return addresses
    staged = runtime.from_host(np.array(addresses, np.uint64).view(np.float64), device)
    return _DeviceList(staged) if hasattr(staged, "__cuda_array_interface__") else addresses
