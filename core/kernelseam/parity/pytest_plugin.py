"""The parity matrix in pytest, for this project and for other vendors' plugins.

    pytest -p kernelseam.pytest_options --pyargs kernelseam.parity --backend NAME

runs every case on every implementation of a backend; without the options, of the one that
KERNELSEAM_BACKEND names, or of all that have a device. A test is named
CASE-on-BACKEND-IMPLEMENTATION; select with ``-k``. A case that an implementation may refuse, and
does, is skipped with the reason. The run ends with a table.

To add the matrix to your own tests: in a conftest.py ``from kernelseam.parity.pytest_plugin
import *``; then

    def test_parity(parity_outcome):
        parity_outcome.require()
"""

from __future__ import annotations

try:
    import pytest
except ModuleNotFoundError as e:
    raise ModuleNotFoundError(
        "the parity matrix as tests needs pytest, which kernelseam does not install: pip install "
        "pytest; or run "
        "`kernelseam parity`, which needs nothing more",
        name="pytest",
    ) from e

from kernelseam.dispatch import preferred_backend
from kernelseam.parity.matrix import matrix
from kernelseam.parity.report import summary
from kernelseam.parity.running.run import Outcome, Target, run_case, targets
from kernelseam.samples.case import Case

OUTCOMES = pytest.StashKey[list[Outcome]]()

__all__ = ["parity_outcome", "pytest_generate_tests", "pytest_terminal_summary"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every case on every implementation of its operation."""
    if "parity_outcome" not in metafunc.fixturenames:
        return
    tested = targets(
        backend=preferred_backend(metafunc.config.getoption("kernelseam_backend", None))
    )
    pairs = [(c, t) for c in matrix() for t in tested if t.operation == c.operation]
    metafunc.parametrize(
        "parity_outcome", pairs, ids=[f"{c.name}-on-{t}" for c, t in pairs], indirect=True
    )


@pytest.fixture
def parity_outcome(request: pytest.FixtureRequest) -> Outcome:
    """The outcome of one case on one implementation."""
    pair: tuple[Case, Target] = request.param
    outcome = run_case(*pair)
    request.config.stash.setdefault(OUTCOMES, []).append(outcome)
    if outcome.status == "refused":
        pytest.skip(f"{pair[1]} refuses: {outcome.detail}")
    return outcome


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """The table, once, however many conftests imported this hook."""
    outcomes = config.stash.get(OUTCOMES, [])
    if outcomes:
        terminalreporter.section("parity")
        terminalreporter.write_line(summary.table(summary.rows(outcomes)))
        config.stash[OUTCOMES] = []
