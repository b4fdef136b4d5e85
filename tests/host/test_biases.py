"""A bias that is no number in base 2: parity's bound, which grows with a bias, is no bound
there."""

from __future__ import annotations

import numpy as np
import pytest
from kernelseam.parity.matrix import named
from kernelseam.parity.operations import operands
from kernelseam.parity.running.stages import compute, prepare
from kernelseam.plugins import Plugins
from kernelseam_hostcpp.runtime import DEVICES


@pytest.mark.parametrize(
    "name", ["attention-f16-64-bias-f32-lowest", "attention-f16-64-bias-f32-lowest-ramp"]
)
def test_a_row_of_the_lowest_bias_alone_is_the_mean_of_the_values(
    hostcpp: Plugins, name: str
) -> None:
    case = named(name)
    before = prepare(case)
    out = before.layout.read(compute(case, DEVICES[0], "shared", before).buffers, "out").astype(
        np.float64
    )
    values = operands.values(case)
    everywhere = (values["bias"] == np.finfo(np.float32).min).all(axis=3)
    assert everywhere.sum() == out[:, :, ::3, 0].size
    means = np.broadcast_to(values["v"].astype(np.float64).mean(axis=2, keepdims=True), out.shape)
    np.testing.assert_allclose(out[everywhere], means[everywhere], atol=2e-3)
