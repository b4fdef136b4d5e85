"""The protocol by which problems whose like were planned are planned from their numbers.

Planning depends on this protocol only. The package registers what knows kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kernelseam.contract import Device, Problem


class KnownLaunches(Protocol):
    """The launches of one problem, as far as they do not depend on addresses."""

    workspace_bytes: int
    workspace_alignment: int
    zeroed_bytes: int

    def bind(
        self, pointers: Mapping[str, int], workspace: int
    ) -> tuple[Callable[[int], None], ...] | None:
        """Launches over operands and a workspace whose first ``zeroed_bytes`` are zero; None where
        the plan must be built and bound, which raises the proper error."""


class KnownProblems(Protocol):
    """Launches of problems as functions of their numbers."""

    def find(
        self, problem: Problem, device: Device, implementation: str | None
    ) -> KnownLaunches | None:
        """Those of a problem; None where none like it was learnt."""

    def learn(self, problem: Problem, device: Device, implementation: str | None) -> None:
        """From a problem that was planned."""


_registered: KnownProblems | None = None


def register(problems: KnownProblems) -> None:
    """Set those of the process."""
    global _registered
    _registered = problems


def known_problems() -> KnownProblems:
    """Those that are registered."""
    assert _registered is not None, "importing kernelseam registers one"
    return _registered
