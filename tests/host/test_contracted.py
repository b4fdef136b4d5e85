"""Products fused with the sums that take them, as compilers for GPUs do by default: the kernels
still pass.

The host platform compiles without contraction, and what a compiler contracts for a CPU is not what
hiprtc does: a product that something else needs as well is left alone. So these cases are compiled
with a float of the platform's own (host/contracted.h), which fuses with every sum that it can, on
every CPU and with every compiler.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from kernelseam.contract import Device
from kernelseam.parity.matrix import named
from kernelseam_hostcpp.executable import Report, run
from kernelseam_hostcpp.runtime import DEVICES
from mutant import CONTRACTED, Mutant
from mutants import MUTANTS

Probe = Callable[..., None]
SUMS = """
KS_KERNEL(WARP, 1) probe(const float* a, const float* b, const float* c, float* out) {
  const int i = lane();
  const float y = a[i] * b[i];
  float* const to = out + i;
  to[0] = y - y, to[WARP] = y + c[i], to[2 * WARP] = c[i] + y, to[3 * WARP] = y - c[i], to[4 * WARP] = c[i] - y;
  float z = c[i];
  z += y, to[5 * WARP] = z;
  z = c[i] * c[i], to[6 * WARP] = y - y;
}
"""  # noqa: E501


@pytest.mark.parametrize("contracted", [True, False])
def test_what_is_fused(probe: Probe, contracted: bool) -> None:
    """The product made last, with either operand and with both; no other."""
    rng, out = np.random.default_rng(0), np.zeros((7, 16), np.float32)
    a, b, c = (rng.standard_normal(16).astype(np.float32) for _ in range(3))
    probe(SUMS, 16, a, b, c, out, contracted=contracted)
    exact, y = a.astype(np.float64) * b, a * b
    taken = exact if contracted else y
    expected = [taken - y, taken + c, c + taken, taken - c, c - taken, c + taken, y - y]
    assert np.all(exact != y), "every product is rounded"
    np.testing.assert_array_equal(out, np.array(expected, np.float32))


@pytest.fixture(scope="module")
def reports(
    ahead: Callable[..., Callable[[pytest.Item], Report]],
) -> Callable[[pytest.Item], Report]:
    return ahead("test_parity", lambda name, device: run(named(name), device, "contracted"))


def _on(device: Device) -> object:
    return pytest.param(
        device,
        id=device.arch,
        marks=[] if device is DEVICES[0] else [pytest.mark.slow("another way to copy")],
    )


@pytest.mark.parametrize("device", [_on(d) for d in DEVICES])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow("three of four: a compilation each")] * (i % 4 > 0))
        for i, n in enumerate(CONTRACTED)
    ],
)
def test_parity(
    request: pytest.FixtureRequest,
    reports: Callable[[pytest.Item], Report],
    name: str,
    device: Device,
) -> None:
    report = reports(request.node)
    assert report.findings == (), report.log
    assert report.verdict is not None and report.verdict.passed, report.verdict


@pytest.mark.parametrize(
    "mutant", [m for m in MUTANTS if m.build == "contracted"], ids=lambda m: m.name
)
def test_without_contraction_nothing_shows(mutant: Mutant) -> None:
    """What test_mutants.py kills."""
    for device in DEVICES:
        report = run(named(mutant.case), device, "plain", mutant)
        assert report.findings == () and report.verdict is not None and report.verdict.passed, (
            report.verdict
        )
