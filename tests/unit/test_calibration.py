"""The constants of the tolerances are large enough for the NumPy reference on random problems, with
half to spare, and not much larger."""

from __future__ import annotations

from collections.abc import Callable

import calibration
import numpy as np
import pytest
from calibration import Sample
from kernelseam.oracle import tolerances


@pytest.mark.parametrize(
    ("draw", "constant", "least"),
    [
        (calibration.attention_sample, tolerances.ATTENTION_CONSTANT, 0.1),
        (calibration.variant_sample, tolerances.ATTENTION_CONSTANT, 0.1),
        (calibration.gradient_sample, tolerances.ATTENTION_CONSTANT, 0.05),
        (calibration.gemm_sample, tolerances.GEMM_CONSTANT, 0.05),
        (calibration.precision_sample, tolerances.GEMM_CONSTANT, 0.05),
        (calibration.sum_sample, tolerances.GEMM_CONSTANT, 0.05),
    ],
)
def test_constants_have_room(
    draw: Callable[[np.random.Generator], Sample], constant: float, least: float
) -> None:
    rng = np.random.default_rng(5)
    samples = [draw(rng) for _ in range(40)]
    assert max(s.ratio for s in samples) < 1
    assert least < max(s.needed for s in samples) < constant / 2
