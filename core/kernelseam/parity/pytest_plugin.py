"""The parity matrix in pytest, for this project and for a vendor of one's own.

In a conftest.py: ``from kernelseam.parity.pytest_plugin import *``; then a test is

    def test_parity(parity_outcome):
        parity_outcome.require()

It runs once for every case and every implementation found, of one backend where KERNELSEAM_BACKEND names one. What an
implementation refuses as it may is skipped with its reason. A table ends the run.
"""

from __future__ import annotations

import pytest

from kernelseam.dispatch import preferred_backend
from kernelseam.parity import report
from kernelseam.parity.cases import Case, matrix
from kernelseam.parity.run import Outcome, Target, run_case, targets

OUTCOMES = pytest.StashKey[list[Outcome]]()

__all__ = ["parity_outcome", "pytest_generate_tests", "pytest_terminal_summary"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every case on every implementation of its operation."""
    if "parity_outcome" not in metafunc.fixturenames:
        return
    found = targets(backend=preferred_backend())
    pairs = [(c, t) for c in matrix() for t in found if t.operation == c.operation]
    metafunc.parametrize("parity_outcome", pairs, ids=[f"{c.name}-on-{t}" for c, t in pairs], indirect=True)


@pytest.fixture
def parity_outcome(request: pytest.FixtureRequest) -> Outcome:
    """What became of one case on one implementation."""
    pair: tuple[Case, Target] = request.param
    outcome = run_case(*pair)
    request.config.stash.setdefault(OUTCOMES, []).append(outcome)
    if outcome.status == "refused":
        pytest.skip(f"{pair[1]} refuses: {outcome.detail}")
    return outcome


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The table."""
    outcomes = config.stash.get(OUTCOMES, [])
    if outcomes:
        terminalreporter.section("parity")
        terminalreporter.write_line(report.table(report.rows(outcomes)))
