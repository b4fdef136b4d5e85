"""The matrix as tests, for ``pytest --pyargs kernelseam.parity``."""

from __future__ import annotations

from kernelseam.parity.running.run import Outcome


def test_parity(parity_outcome: Outcome) -> None:
    """One case on one implementation."""
    parity_outcome.require()
