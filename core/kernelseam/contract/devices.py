"""Devices and their limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from kernelseam.frozen import dataclass

EMULATED = "emulated"
"""`Device.evidence` of an emulated device."""
ABSENT = "absent"
"""`Device.evidence` of a device that is not here: known from its data sheet, for predictions."""
HOST = "host"
"""`Device.evidence` of the host CPU, whose memory Python can read."""


@dataclass(frozen=True)
class DeviceLimits:
    """A device's limits, as dispatch and kernel definitions use them. Rates are peaks, in SI
    units."""

    compute_units: int = 1
    shared_bytes_per_block: int = 0
    memory_bytes: int = 0
    bytes_per_second: float = 1e10
    operations_per_second: Mapping[str, float] = field(default_factory=dict, hash=False)
    """By dtype name; float16 and bfloat16 mean the matrix units."""
    launch_seconds: float = 5e-6


@dataclass(frozen=True)
class Device:
    """One GPU, or the host."""

    backend: str
    index: int
    arch: str
    name: str = field(default="", compare=False)
    limits: DeviceLimits = field(default_factory=DeviceLimits, compare=False)
    evidence: str = field(default="measured", compare=False)
    """Where results come from: "measured" on the hardware, "emulated" by a program that interprets
    the hardware's instructions, or "host" for the host CPU; "absent" for a device that is not here,
    about which dispatch is asked and on which nothing runs. An emulated device is used only where
    it or its backend is named, and its times are meaningless."""

    @property
    def is_host(self) -> bool:
        """Whether it is the host CPU. Its memory can be read without synchronisation, so that the
        contents of index arrays are checked at every launch."""
        return self.evidence == HOST

    def __str__(self) -> str:
        if self.evidence == ABSENT:
            return f"{self.backend} ({self.arch}, not here)"
        emulated = ", emulated" if self.evidence == EMULATED else ""
        return f"{self.backend}:{self.index} ({self.arch}{emulated})"
