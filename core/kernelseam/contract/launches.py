"""Kernel launches that compute a problem over one workspace."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kernelseam.contract.archs import ArchRow
from kernelseam.contract.devices import Device
from kernelseam.contract.plans import WORKSPACE_ALIGNMENT
from kernelseam.forking import cached_property


@dataclass(frozen=True)
class Launch:
    """One kernel: whose it is, its problem, its tile. ``workspace``: parameters whose memory is the
    workspace's, with their offset in bytes, a multiple of 16. ``operands``: parameters that take
    another operand than the kernel's own operation would give them, with its name. A tensor map is
    such a parameter, too."""

    kernel: Any
    problem: Any
    tile: Any
    workspace: Mapping[str, int] = field(default_factory=dict)
    operands: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Memset:
    """Set ``size`` bytes of the workspace from ``offset`` to ``value``."""

    offset: int
    size: int
    value: int = 0


@dataclass(frozen=True)
class Launches:
    """Kernels, and memory that is set, in order; the bytes of the workspace that they share, and
    its alignment.

    ``zeroed_bytes``: the workspace's first bytes that must be 0 before the first launch and that
    the kernels leave 0. That spares a Memset, where the workspace stays the same from launch to
    launch, and where launches on a stream, also those of other kernels, share these bytes: what
    starts early must wait for its predecessor before it touches them.
    """

    steps: tuple[Launch | Memset, ...]
    workspace_bytes: int = 0
    workspace_alignment: int = WORKSPACE_ALIGNMENT
    zeroed_bytes: int = 0

    @cached_property
    def kernels(self) -> tuple[Launch, ...]:
        """The steps that are kernels."""
        return tuple([s for s in self.steps if isinstance(s, Launch)])


class Composition(ABC):
    """Base class: computes an operation's problems by one or several kernels. Methods with a body
    are defaults."""

    operation: str
    name: str = "shared"
    """The implementation's. Kernels that the core shares among vendors are called "shared"."""
    archs: tuple[str, ...] = ()
    """Its archs; () for all of the toolchain."""

    @abstractmethod
    def refuse(self, problem: Any, row: ArchRow) -> str | None:
        """Why it does not support the problem on that arch, or None."""

    @abstractmethod
    def tile(self, problem: Any, row: ArchRow, device: Device) -> Any:
        """The tile configuration for a problem, or those of its kernels."""

    def takes(self, problem: Any, tile: Any, row: ArchRow, device: Device) -> bool:
        """Whether a tile that ``tile`` chose for another problem of the spec, its class's
        representative, takes this one. Say yes wherever it computes the right result, so that a
        class has one tile; by default, where it is the problem's own."""
        return bool(tile == self.tile(problem, row, device))

    @abstractmethod
    def launches(self, problem: Any, tile: Any, device: Device) -> Launches:
        """The launches for the problem: one kernel or several."""

    def variants(self, problem: Any, row: ArchRow, device: Device) -> Mapping[str, Any]:
        """Tiles for tuning to measure, by stable names, the default of ``tile`` first. Empty where
        there is no choice."""
        return {}

    def covering(self) -> Iterable[Any]:
        """Kernels of its own (``kernelseam.kernels.Covered``) that the tests compile for its archs:
        between them they touch every way through it."""
        return ()
