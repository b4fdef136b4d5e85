"""The protocol by which ``bind(check=True)`` compares a call's results with the oracle.

Planning depends on this protocol only. The package registers the oracle, which knows every
operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from kernelseam.contract import Problem, Runtime


class Verification(Protocol):
    """The check of one run of a call. Created before the launches, as it may read operands that
    they overwrite."""

    def require(self) -> None:
        """Wait for the launches. Raises WrongResult where a value is outside of its tolerance."""


class Verifier(Protocol):
    """Compares calls of the operations that the oracle knows."""

    def require_supported(self, problem: Problem) -> None:
        """Raises InvalidValue where the oracle cannot compute a problem's results."""

    def verification(self, plan: Any, pointers: dict[str, int], runtime: Runtime) -> Verification:
        """``plan``: a kernelseam.Plan; ``pointers``: its operands' addresses by name."""


_verifier: Verifier | None = None


def register(verifier: Verifier) -> None:
    """Set the verifier of the process."""
    global _verifier
    _verifier = verifier


def verifier() -> Verifier:
    assert _verifier is not None, "importing kernelseam registers one"
    return _verifier
