"""Devices: what dispatch and the kernel definitions ask of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

EMULATED = "emulated"
"""`Device.evidence` of a device whose instructions are interpreted by a program."""
HOST = "host"
"""`Device.evidence` of the host's processor, which shares its memory with Python."""


@dataclass(frozen=True)
class DeviceLimits:
    """What dispatch and the kernel definitions ask of a device. Rates are peaks, in SI
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
    """What a result from here shows of the arch: "measured" on the hardware itself, "emulated" by a
    program that runs the hardware's instructions, or "host", where the host's processor is the
    arch. An emulated device is used only where its backend or the device itself is named, and its
    times say nothing."""

    @property
    def is_host(self) -> bool:
        """Whether it is the host's processor: then its memory is read like any of Python's, without
        waiting for anything, and what stands there is checked at every launch."""
        return self.evidence == HOST

    def __str__(self) -> str:
        emulated = ", emulated" if self.evidence == EMULATED else ""
        return f"{self.backend}:{self.index} ({self.arch}{emulated})"
