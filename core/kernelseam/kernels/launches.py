"""What an operation's host half launches for a problem: one kernel or several over one
workspace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kernelseam.contract import WORKSPACE_ALIGNMENT


@dataclass(frozen=True)
class Launch:
    """One kernel: whose it is, its problem, its tile. ``workspace``: parameters whose memory is the
    workspace's, with their offset in bytes, a multiple of 16. ``operands``: parameters that take
    another operand than the kernel's own operation would give them, with its name. A tensor map is
    such a parameter, too."""

    half: Any
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
