"""GEMMs of A and B of 8 bits on the host platform: parity, and which arch multiplies which."""

from __future__ import annotations

import pytest
from kernelseam.contract import Device
from kernelseam.descriptors import BatchedGemmStrided
from kernelseam.dispatch import consider
from kernelseam.dtypes import E4M3
from kernelseam.plugins import Plugins
from kernelseam_hostcpp.runtime import DEVICES
from own_cases import on_devices, require_passed

OWN = dict(zip((d.arch for d in DEVICES), E4M3, strict=True))
CASES = (
    *("nn", "nt-integers", "tn", "tt-integers", "nt-added", "nt-group", "nn-odd", "nt-sum"),
    *("nt-nan-scales", "nt-to-float32-beta"),
    *("nt-pointers", "nt-pointers-scales", "nt-pointers-scales-k-0"),
    *("nt-blocks-1x128x128", "nn-blocks-1x128x128", "nt-blocks-of-32", "nt-blocks-of-rows"),
    *("nt-blocks-ragged", "nt-blocks-group", "nt-blocks-integers", "nt-blocks-added"),
    *("nt-blocks-k-0", "nt-blocks-nan-scales"),
)

OFTEN = {
    *("nt-integers", "tn", "nt-added", "nn-odd", "nt-sum", "nt-nan-scales"),
    *("nt-pointers-scales", "nn-blocks-1x128x128", "nt-blocks-ragged", "nt-blocks-group"),
    *("nt-blocks-added", "nt-blocks-nan-scales"),
}


@pytest.mark.parametrize(("name", "device"), on_devices(CASES, OFTEN))
def test_parity(hostcpp: Plugins, name: str, device: Device) -> None:
    """None is refused."""
    dtype = OWN[device.arch].value.removeprefix("float8_")
    require_passed(f"gemm-{dtype}-{name}", device, "shared")


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.arch)
def test_the_other_dtype_is_refused_by_name(hostcpp: Plugins, device: Device) -> None:
    (other,) = set(E4M3) - {OWN[device.arch]}
    problem = BatchedGemmStrided(M=8, N=8, K=8, dtype=other).problem()
    refusals = {c.implementation.name: c.refusal for c in consider(problem, device)}
    assert refusals["shared"] == f"{device.arch} multiplies {OWN[device.arch]}, not {other}"
