"""Who holds a call's results against the oracle where ``bind(check=True)`` asks for that.

Planning knows this protocol alone: the oracle, which knows every operation, is registered by the
package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from kernelseam.contract import Runtime


class Verification(Protocol):
    """One run of a call: made before its launches, as it may read what they overwrite."""

    def require(self) -> None:
        """Wait for the launches. Raises WrongResult where a number is beyond its tolerance."""


class Verifier(Protocol):
    """What makes one."""

    def __call__(self, plan: Any, pointers: dict[str, int], runtime: Runtime) -> Verification:
        """``plan``: a kernelseam.Plan; ``pointers``: its operands' addresses by name."""


_verifier: Verifier | None = None


def register(verifier: Verifier) -> None:
    """Let this one verify from now on."""
    global _verifier
    _verifier = verifier


def verifier() -> Verifier:
    """The one that is registered."""
    assert _verifier is not None, "importing kernelseam registers one"
    return _verifier
