"""What an operation's host half launches for a problem: one kernel or several over one workspace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Launch:
    """One kernel: whose it is, its problem, its tile. ``workspace``: parameters whose memory is the workspace's, with
    their offset in bytes, a multiple of 16. ``operands``: parameters that take another operand than the kernel's own
    operation would give them, with its name."""

    half: Any
    problem: Any
    tile: Any
    workspace: Mapping[str, int] = field(default_factory=dict)
    operands: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Launches:
    """Kernels in order, and the bytes of the workspace that they share."""

    steps: tuple[Launch, ...]
    workspace_bytes: int = 0
