"""Biases, sinks and slopes that are no numbers in base 2: parity's bound, which grows with them, is
no bound there."""

from __future__ import annotations

from typing import Any

import kernelseam as ks
import numpy as np
import pytest
from kernelseam.parity.matrix import named
from kernelseam.parity.running.stages import compute, prepare
from kernelseam.plugins import Plugins
from kernelseam.samples.common import DECODE, UNFUSED
from kernelseam.samples.operations import operands
from kernelseam_hostcpp.runtime import DEVICES, HostArray


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


def attended(implementation: str | None, S_q: int, S_k: int, **options: Any) -> tuple[Any, Any]:
    """out and LSE of four heads; None: by NumPy in float64."""
    rng = np.random.default_rng(11)
    arrays = [rng.standard_normal((1, 4, n, 32)).astype(np.float16) for n in (S_q, S_k, S_k)]
    if implementation is None:
        return ks.attention(*(x.astype(np.float64) for x in arrays), return_lse=True, **options)
    if implementation == "numpy":
        return ks.attention(*arrays, return_lse=True, **options)
    out, lse = ks.attention(
        *map(HostArray, arrays),
        return_lse=True,
        implementation=implementation,
        **{n: HostArray(x) for n, x in options.items()},
    )
    return out.host, lse.host


@pytest.mark.parametrize("implementation", ["shared", UNFUSED, DECODE])
def test_sinks_of_any_finite_size(hostcpp: Plugins, implementation: str) -> None:
    sinks = np.array([3e38, -3e38, 2.4e38, 0.5], np.float32)
    want, want_lse = attended(None, 3, 40, sinks=sinks)
    out, lse = attended(implementation, 3, 40, sinks=sinks)
    np.testing.assert_allclose(out, want, atol=2e-3)
    np.testing.assert_allclose(lse, np.minimum(want_lse, np.float32(2.3586574e38)), rtol=1e-5)
    out, _ = attended(implementation, 3, 40, sinks=np.array([np.inf, 1, 1, 1], np.float32))
    assert np.isnan(out[:, 0]).all() and np.isfinite(out[:, 1:]).all()


@pytest.mark.parametrize("implementation", ["shared", UNFUSED, DECODE, "numpy"])
def test_slopes_of_any_size(hostcpp: Plugins, implementation: str) -> None:
    """Where a slope is steep the nearest key takes the row, of a negative one the farthest."""
    slopes = np.array([[3e38, -2.4e38, np.inf, 1]], np.float32)
    few = implementation == DECODE  # takes no more queries than a few
    for S_q, S_k in ((3, 40), (3, 40) if few else (40, 4)):  # no two keys are as far
        want, _ = attended(None, S_q, S_k, alibi_slopes=np.clip(slopes, -1e6, 1e6))
        out, lse = attended(implementation, S_q, S_k, alibi_slopes=slopes)
        assert np.isfinite(lse).all()
        np.testing.assert_allclose(out, want, atol=2e-3)


def test_the_gradient_of_a_sink_that_takes_the_row(hostcpp: Plugins) -> None:
    rng = np.random.default_rng(3)
    q, k, v, dout = (rng.standard_normal((1, 2, 5, 32)).astype(np.float16) for _ in range(4))
    sinks = np.array([3e38, -3e38], np.float32)
    given = [HostArray(x) for x in (q, k, v)]
    out, lse = ks.attention(*given, sinks=HostArray(sinks), return_lse=True)
    gradients = ks.attention_bwd(
        HostArray(dout), *given, out, lse, sinks=HostArray(sinks), sink_gradient=True
    )
    assert gradients.dsinks is not None
    assert (gradients.dsinks.host == 0).all()
    assert (gradients.dq.host[:, 0] == 0).all() and np.isfinite(gradients.dq.host).all()
