"""What dispatch takes of problems with few queries, and how long an H200 took for it."""

from __future__ import annotations

import pytest
from kernelseam.dispatch import select
from kernelseam.kernels import KernelImplementation
from kernelseam.variants import variants_of

pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
from h200_few_rows import FewRow, configuration, few_rows  # noqa: E402
from h200_rows import H200  # noqa: E402

GOOD, BAD = 0.05, 0.26
LEAST_GOOD, MOST_REGRET = 0.83, 0.021
"""What costs reach: part of the rows within GOOD of the best, and how far behind on average."""
ROWS = tuple(few_rows())


def regret(row: FewRow) -> float:
    """Of what dispatch takes, by the time of the best; it was near that, or the row has no time."""
    taken = select(row.problem, H200).implementation
    assert isinstance(taken, KernelImplementation)
    variant = variants_of(taken, row.problem, H200)[0].name
    name = configuration(taken.name, taken._tiles(row.problem, H200)[variant])
    assert name in row.us, f"{name} was not measured, or not near the best: {row.us}"
    return row.us[name] / min(row.us.values()) - 1


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.name)
def test_what_is_taken_is_near_the_best(row: FewRow) -> None:
    assert regret(row) <= BAD, row.us


def test_most_of_what_is_taken_is_as_good_as_the_best() -> None:
    found = [regret(row) for row in ROWS]
    assert sum(x <= GOOD for x in found) >= LEAST_GOOD * len(found)
    assert sum(found) <= MOST_REGRET * len(found)
