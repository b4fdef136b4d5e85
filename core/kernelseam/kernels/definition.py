"""Kernel definitions: the host side of a device source. One stands beside each source, the core's
and a plugin's own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from kernelseam.contract import (
    ArchRow,
    Composition,
    Device,
    Launch,
    LaunchConfig,
    Launches,
    TensorMap,
)
from kernelseam.costs import Work, predicted
from kernelseam.kernels.config import TEXTS, Constants
from kernelseam.kernels.signature import Signature
from kernelseam.kernels.sources import shared_sources


class KernelDefinition(Composition):
    """The host side of a kernel: its entry and source, tiles, constants, signature, grid, shared
    memory and launch arguments. ``launches`` consists of this kernel, or of it and others."""

    entry: str
    """The kernel's name; where the signature is flat, of the generated entry, which calls the
    source's ``<entry>_body``."""
    source: str
    """The source file, by include name."""
    any_tile: bool = False
    """Whether each of its tiles computes every problem of the spec."""
    early: bool = False
    """Whether it is launched with programmatic stream serialization on archs that have it: it
    may start while its predecessor ends, and waits for what it reads."""
    multiplies: bool = False
    """Whether it multiplies matrices; in half precision the tests then look for matrix
    instructions."""

    def sources(self) -> Mapping[str, str]:
        """Include name → text of the device sources besides the core's and the platform's:
        ``source`` and what it includes. A plugin's definition returns those of its plugin
        (``headers_below``)."""
        return shared_sources()

    texts: Mapping[str, str] = TEXTS
    """Constant → its description, for the generated source."""

    @abstractmethod
    def tiles(self, spec: Any, row: ArchRow) -> tuple[Any, ...]:
        """The arch's tile configurations for a spec, the preferred first."""

    def tile(self, problem: Any, row: ArchRow, device: Device) -> Any:
        return self.tiles(problem.spec, row)[0]

    def takes(self, problem: Any, tile: Any, row: ArchRow, device: Device) -> bool:
        return self.any_tile or super().takes(problem, tile, row, device)

    def as_launched(self, spec: Any, tile: Any) -> tuple[Any, ...]:
        """The forms of a tile that launches use, each with a binary of its own."""
        return (tile,)

    def constants(self, spec: Any, tile: Any, row: ArchRow) -> Constants:
        """Constants of the binary: the members of ``struct Config``, which its source includes."""
        return {}

    def defines(self, spec: Any, tile: Any, row: ArchRow) -> dict[str, object]:
        """Further constants, as macros ``KS_NAME``: for sources in a language that has no
        ``struct``."""
        return {}

    @abstractmethod
    def signature(self, spec: Any) -> Signature:
        """The parameters of the binary."""

    @abstractmethod
    def grid(self, problem: Any, tile: Any, device: Device) -> int:
        """Blocks."""

    def launches(self, problem: Any, tile: Any, device: Device) -> Launches:
        """One launch of this kernel. Override it where a problem takes several."""
        return Launches((Launch(self, problem, tile),))

    def threads(self, tile: Any, row: ArchRow) -> int:
        """Threads of a block: by default the tile's, or those of its warps."""
        return int(getattr(tile, "threads", 0) or row.warp_size * tile.warps)

    def cluster(self, tile: Any) -> int:
        """Blocks of a cluster, on archs that have clusters."""
        return 1

    def cooperative(self, tile: Any) -> bool:
        """Whether blocks wait for others that begin later: then all must run at once."""
        return False

    def shared_bytes(self, spec: Any, tile: Any) -> int:
        """Bytes of dynamic shared memory of a block: by default the tile's."""
        return int(tile.shared_bytes(spec))

    def config(self, problem: Any, tile: Any, row: ArchRow, device: Device) -> LaunchConfig:
        """The launch configuration."""
        blocks, threads = self.grid(problem, tile, device), self.threads(tile, row)
        shared, cluster = self.shared_bytes(problem.spec, tile), self.cluster(tile)
        early = self.early and row.programmatic_launch
        extents = (blocks, 1, 1), (threads, 1, 1)
        together = self.cooperative(tile)
        return LaunchConfig(*extents, shared, (cluster, 1, 1), early, together)

    @abstractmethod
    def values(self, problem: Any, tile: Any, device: Device) -> dict[str, int | float]:
        """Parameter → argument, without pointers and tensor maps."""

    operands: Mapping[str, str] = {}
    """Pointer parameter → operand name, where they differ."""

    def pointers(self, spec: Any) -> dict[str, str]:
        """Pointer parameter → operand name. A parameter without an operand is null, or in the
        workspace."""
        names = {**self.operands, **getattr(getattr(spec, "forward", spec), "renamed", {})}
        return {p: names.get(p, p) for p in self.signature(spec).pointers}

    def tensor_maps(self, problem: Any, tile: Any, device: Device) -> dict[str, TensorMap]:
        """Tensor map parameter → the map."""
        return {}

    @abstractmethod
    def work(self, problem: Any, tile: Any, device: Device) -> Work:
        """The work of a launch, from which its time is predicted."""


class OfferingDefinition(KernelDefinition):
    """A kernel with several tiles for a problem; it chooses the one with the lowest predicted
    time."""

    @abstractmethod
    def offered(self, problem: Any, row: ArchRow) -> Sequence[Any]:
        """The tiles that support a problem."""

    def tile(self, problem: Any, row: ArchRow, device: Device) -> Any:
        return min(
            self.offered(problem, row),
            key=lambda t: predicted(self.work(problem, t, device), row.costs, device.limits),
        )

    def variants(self, problem: Any, row: ArchRow, device: Device) -> Mapping[str, Any]:
        """Name → tile, for every tile that supports the problem; the choice of ``tile`` first."""
        return {t.name: t for t in (self.tile(problem, row, device), *self.offered(problem, row))}
