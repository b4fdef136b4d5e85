"""The matrix's cases that one kernel must take, on the host platform."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest
from kernelseam.contract import Device
from kernelseam.parity.matrix import matrix, named
from kernelseam.parity.running.run import Target, run_case
from kernelseam_hostcpp import HostToolchain
from kernelseam_hostcpp.runtime import DEVICES


def own_cases(names: Iterable[str], often: Collection[str]) -> list[object]:
    """Parameters (name, device): every case on every device that converts its dtype of 8 bits, if
    it has one; those not in ``often`` are slow."""
    cases = {c.name: c for c in matrix()}
    known = {d: HostToolchain().arch_row(d.arch).fp8_dtypes for d in DEVICES}
    return [
        pytest.param(
            name,
            device,
            id=f"{name}-{device.arch}",
            marks=[] if name in often else [pytest.mark.slow("a compilation each")],
        )
        for name in names
        for device in DEVICES
        if getattr(cases[name], "dtype_kv", None) in (None, *known[device])
    ]


def on_devices(names: Iterable[str]) -> list[object]:
    """Parameters (name, device): of three cases two on the first device and one on the other, which
    has its own way to copy; the rest is slow."""
    return [
        pytest.param(
            name,
            device,
            id=f"{name}-{device.arch}",
            marks=[pytest.mark.slow("the other way to copy: a compilation each")]
            if (device is DEVICES[0]) == (i % 3 == 2)
            else [],
        )
        for i, name in enumerate(names)
        for device in DEVICES
    ]


def require_passed(name: str, device: Device, implementation: str) -> None:
    """Run a case by the implementation, which may not refuse it."""
    case = named(name)
    outcome = run_case(case, Target(device, implementation, case.operation, builtin=True))
    assert outcome.status == "passed", outcome.detail
