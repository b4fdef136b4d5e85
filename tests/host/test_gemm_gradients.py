"""bmm with all that it adds, and its gradients, through the shared kernel: small integers, so bit
for bit; one launch each."""

from __future__ import annotations

import numpy as np
import pytest
from gradient_problems import BROADCAST, Array, integers, uneven, what_repeats
from kernelseam import bmm, bmm_bwd, trace
from kernelseam.plugins import Plugins
from kernelseam_hostcpp.runtime import HostArray

RNG = np.random.default_rng(50)


@pytest.mark.parametrize("broadcast", BROADCAST)
@pytest.mark.parametrize("group", [1, 3])
def test_gradients(hostcpp: Plugins, broadcast: str, group: int) -> None:
    held(*what_repeats(RNG, broadcast, group))


def test_sums_that_two_strides_do_not_walk(hostcpp: Plugins) -> None:
    """Over heads with gaps and their rows: products of one row each, by their addresses."""
    held(*uneven(RNG))


def held(given: list[Array], wanted: list[Array]) -> None:
    with trace() as launches:
        results = bmm_bwd(*(HostArray(x) for x in given))
    assert [r.kernel for r in launches] == ["gemm", "gemm"]
    for x, w in zip(results, wanted, strict=True):
        np.testing.assert_array_equal(x.host, w)


def test_everything_in_one_launch(hostcpp: Plugins) -> None:
    a, b, bias = integers(RNG, 2, 6, 33, 20), integers(RNG, 2, 2, 20, 17), integers(RNG, 6, 17)
    out, residual = (
        HostArray(integers(RNG, 2, 6, 33, 17)),
        integers(RNG, 2, 33, 6, 17).transpose(0, 2, 1, 3),
    )
    expected = 2 * (a @ np.repeat(b, 3, axis=1)) - out.host + bias[:, None] + residual
    with trace() as launches:
        y = bmm(
            HostArray(a),
            HostArray(b),
            alpha=2,
            beta=-1,
            bias=HostArray(bias),
            residual=HostArray(residual),
            out=out,
        )
    assert y is out and [r.kernel for r in launches] == ["gemm"]
    np.testing.assert_array_equal(out.host, expected)
    again = out.host + a @ np.repeat(b, 3, axis=1)
    bmm(HostArray(a), HostArray(b), residual=out, out=out)
    np.testing.assert_array_equal(out.host, again)
