"""Cases × implementations found here: on the host the reference, on a GPU machine shared kernels
and libraries too."""

from __future__ import annotations

from kernelseam.parity.running.run import Outcome


def test_parity(parity_outcome: Outcome) -> None:
    parity_outcome.require()
    assert parity_outcome.verdict is not None
    assert parity_outcome.verdict.worst <= 1
