"""Kernel launches that compute a problem over one workspace."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any

from kernelseam.contract.archs import ArchRow
from kernelseam.contract.devices import Device
from kernelseam.contract.plans import WORKSPACE_ALIGNMENT
from kernelseam.forking import cached_property
from kernelseam.frozen import dataclass


@dataclass(frozen=True)
class Launch:
    """One kernel launch: its definition, problem and tile.

    ``workspace``: pointer parameters (and tensor maps) that point into the workspace, with their
    offset in bytes, a multiple of 16. ``operands``: parameters bound to another operand than the
    kernel's operation would give them, by that operand's name.
    """

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
    """Kernel launches and memsets in order, and the workspace that they share.

    ``zeroed_bytes``: the workspace's first bytes, which must be 0 before the first launch and which
    the kernels leave 0. This saves a Memset in each call. Launches of a stream, also of other
    kernels, may share these bytes: one that starts before its predecessor ends (programmatic
    dependent launch) must wait for it before it touches them.
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
    """Base class of what computes an operation's problems by one or several kernels. Methods with a
    body are defaults."""

    operation: str
    name: str = "shared"
    """The implementation's name. The core's kernels, which all vendors share, are "shared"."""
    archs: tuple[str, ...] = ()
    """The archs that it supports; () for all of the toolchain's."""

    @abstractmethod
    def refuse(self, problem: Any, row: ArchRow) -> str | None:
        """Why it does not support the problem on that arch, or None."""

    @abstractmethod
    def tile(self, problem: Any, row: ArchRow, device: Device) -> Any:
        """The tile configuration for a problem (of a composition: of its kernels)."""

    def takes(self, problem: Any, tile: Any, row: ArchRow, device: Device) -> bool:
        """Whether this problem may use a tile that ``tile`` chose for another problem of its spec,
        the representative of its class. True wherever the result is right, so that a class has one
        tile; by default only where ``tile`` would choose the same."""
        return bool(tile == self.tile(problem, row, device))

    @abstractmethod
    def launches(self, problem: Any, tile: Any, device: Device) -> Launches:
        """The launches for the problem: one kernel or several."""

    def variants(self, problem: Any, row: ArchRow, device: Device) -> Mapping[str, Any]:
        """Tiles for tuning to measure, by stable names, the default of ``tile`` first. Empty where
        there is no choice."""
        return {}

    def covering(self) -> Iterable[Any]:
        """Specs for which it is compiled and looked at (``tools/kernel_table.py``): together they
        take every code path. Those of this repository's own kernels are in
        ``tools/compile_matrix``."""
        return ()
