"""How one operation's results are verified after a call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from kernelseam.contract import Problem
from kernelseam.oracle.check import Verdict
from kernelseam.oracle.operands import Array, Operands

P = TypeVar("P", bound=Problem)


class Verifier(ABC, Generic[P]):
    """One class of problems. Bounds are those of ``docs/accuracy.md`` for data of any mean."""

    def refuse(self, problem: P) -> str | None:
        """Why the oracle cannot say what a problem's results are; None where it can."""
        return None

    def kept(self, problem: P, operands: Operands) -> dict[str, Array]:
        """Before the call: inputs that it may overwrite."""
        return {}

    @abstractmethod
    def verdict(
        self, problem: P, operands: Operands, kept: dict[str, Array], flushed: bool
    ) -> Verdict:
        """After it. ``flushed``: subnormals count as lost."""
