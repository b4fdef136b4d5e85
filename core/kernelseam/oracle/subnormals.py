"""Which devices lose subnormals: their results may vanish below the smallest normal number."""

from __future__ import annotations

import logging

from kernelseam.containment import Contained
from kernelseam.contract import Backend, Device

_log = logging.getLogger("kernelseam")

FLUSHES = "KS_FLUSHES_SUBNORMALS"
"""The constant of an arch's row that says that its matrix units lose subnormals."""


def flushes(backend: Backend, device: Device) -> bool:
    """Whether the row of the device's arch says that its matrix units lose subnormals. A toolchain
    that cannot be asked says nothing: what is broken in it shows where it is needed."""
    try:
        with Contained(f"the toolchain of backend {backend.name}"):
            if backend.toolchain is None or device.arch not in backend.toolchain.archs:
                return False
            return dict(backend.toolchain.arch_row(device.arch).defines).get(FLUSHES) == "1"
    except Exception:
        _log.warning(
            "backend %s does not tell of its arch %s", backend.name, device.arch, exc_info=True
        )
        return False
