"""Launch configurations and loaded kernels."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from operator import mod
from typing import Protocol, runtime_checkable

from kernelseam.contract.archs import ArchRow
from kernelseam.contract.binaries import KernelFacts
from kernelseam.errors import DeviceError
from kernelseam.frozen import dataclass

Extents = tuple[int, int, int]
_ONE: Extents = (1, 1, 1)


@dataclass(frozen=True)
class LaunchConfig:
    """A launch configuration. ``shared_bytes`` is dynamic shared memory; ``cluster`` is in
    blocks."""

    grid: Extents
    block: Extents
    shared_bytes: int = 0
    cluster: Extents = _ONE
    programmatic: bool = False
    """Programmatic dependent launch: the kernel may start before the previous one in the stream has
    ended, and waits for it itself."""
    cooperative: bool = False
    """All blocks run at once, or the launch fails: they may wait for each other."""

    def refuse(self, row: ArchRow) -> str | None:
        """Why the arch does not support this configuration, or None."""
        blocks = math.prod(self.cluster)
        if blocks > 1 and row.cluster_blocks == 1:
            return f"it launches clusters of {blocks} blocks, {row.arch} has no clusters"
        if blocks > row.cluster_blocks:
            return (
                f"it launches clusters of {blocks} blocks, {row.arch} has clusters of at most "
                f"{row.cluster_blocks}"
            )
        if self.cluster != _ONE and (
            min(self.cluster) < 1 or any(map(mod, self.grid, self.cluster))
        ):
            return f"its grid {self.grid} is not divided by its clusters {self.cluster}"
        if self.programmatic and not row.programmatic_launch:
            return f"it is a programmatic dependent launch, {row.arch} has none"
        return None

    def require_plain(self, backend: str) -> None:
        """Raise DeviceError for clusters, programmatic and cooperative launches, which the backend
        does not support."""
        if self.cluster != _ONE:
            raise DeviceError(f"backend {backend} launches no clusters: cluster {self.cluster}")
        if self.programmatic:
            raise DeviceError(f"backend {backend} has no programmatic dependent launch")
        if self.cooperative:
            raise DeviceError(f"backend {backend} has no cooperative launch")

    def __str__(self) -> str:
        cluster = f", cluster {self.cluster}" if self.cluster != _ONE else ""
        plain = f"grid {self.grid}, block {self.block}, {self.shared_bytes} bytes shared"
        way = ", programmatic" * self.programmatic + ", cooperative" * self.cooperative
        return plain + cluster + way


class LoadedKernel(Protocol):
    """A kernel on a device."""

    @property
    def facts(self) -> KernelFacts:
        """Facts from the device's driver; where it has none, from the binary or NOT_KNOWN."""

    def prepare(self, config: LaunchConfig, arguments: bytes) -> Callable[[int], None]:
        """Keep the packed arguments and return ``launch(stream)``, which only launches. Raises
        DeviceError for arguments of another size than the kernel's, and for a config that the
        backend does not support."""


@runtime_checkable
class ReusableKernel(Protocol):
    """An optional extension of LoadedKernel: calls on new extents use it instead of ``prepare``,
    which keeps memory for every launch."""

    def reusable(
        self, config: LaunchConfig, packer: struct.Struct
    ) -> Callable[..., Callable[[int], None]]:
        """``pack(blocks, *values)``, which returns ``launch(stream)``, to be run once and at once:
        so many blocks along the first axis of the grid, the rest by ``config``, with values in the
        packer's order. Several threads may pack and launch at a time. Raises DeviceError as
        ``prepare`` does."""
