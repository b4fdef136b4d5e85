"""What computes a problem by kernels: the launches of one or of several, over one workspace."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kernelseam.contract.archs import ArchRow
from kernelseam.contract.devices import Device
from kernelseam.contract.plans import WORKSPACE_ALIGNMENT


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
    """``size`` bytes of the workspace from ``offset`` on, each set to ``value``: a launch without a
    kernel."""

    offset: int
    size: int
    value: int = 0


@dataclass(frozen=True)
class Launches:
    """Kernels, and memory that is set, in order; the bytes of the workspace that they share, and
    its alignment.

    ``zeroed_bytes``: the workspace's first bytes that must be 0 before the first launch and that
    the kernels leave 0. That spares a Memset, where the workspace stays the same from launch to
    launch.
    """

    steps: tuple[Launch | Memset, ...]
    workspace_bytes: int = 0
    workspace_alignment: int = WORKSPACE_ALIGNMENT
    zeroed_bytes: int = 0

    @property
    def kernels(self) -> tuple[Launch, ...]:
        """The steps that are kernels."""
        return tuple(s for s in self.steps if isinstance(s, Launch))


class Composition(ABC):
    """A way to compute an operation's problems by kernels. Inherit from it: what has a body is a
    default."""

    operation: str
    name: str = "shared"
    """The implementation's. Kernels that the core shares among vendors are called "shared"."""
    archs: tuple[str, ...] = ()
    """Those that it is for; none named: all of the toolchain."""

    @abstractmethod
    def refuse(self, problem: Any, row: ArchRow) -> str | None:
        """Why it does not take the problem on that arch, or None."""

    @abstractmethod
    def tile(self, problem: Any, row: ArchRow, device: Device) -> Any:
        """The tile configuration for a problem, or those of its kernels."""

    @abstractmethod
    def launches(self, problem: Any, tile: Any, device: Device) -> Launches:
        """What computes the problem: one kernel or several."""

    def variants(self, problem: Any, row: ArchRow, device: Device) -> Mapping[str, Any]:
        """Tiles that take the problem, by names that stay, what ``tile`` chooses first: for tuning
        to measure. None: there is nothing to choose among."""
        return {}

    def covering(self) -> Iterable[Any]:
        """Kernels of its own (``kernelseam.kernels.Covered``) that the tests compile for its archs:
        between them they touch every way through it."""
        return ()
