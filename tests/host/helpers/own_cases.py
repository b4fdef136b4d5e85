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
    it has one. Those in ``often`` are run on one device each, in turn; the rest is slow."""
    cases = {c.name: c for c in matrix()}
    known = {d: HostToolchain().arch_row(d.arch).fp8_dtypes for d in DEVICES}
    results: list[object] = []
    turn = 0
    for name in names:
        stored = getattr(cases[name], "dtype_kv", None)
        own = [d for d in DEVICES if stored in (None, *known[d])]
        turn += name in often
        for device in own:
            rare = name not in often or device is not own[turn % len(own)]
            marks = [pytest.mark.slow("a compilation each")] if rare else []
            results.append(pytest.param(name, device, id=f"{name}-{device.arch}", marks=marks))
    return results


def on_devices(names: Iterable[str], often: Collection[str]) -> list[object]:
    """Parameters (name, device): of three cases two on the first device and one on the other, which
    has its own way to copy; the rest is slow, and what is not in ``often``."""
    return [
        pytest.param(
            name,
            device,
            id=f"{name}-{device.arch}",
            marks=[pytest.mark.slow("more of the same kinds: a compilation each")]
            if name not in often or (device is DEVICES[0]) == (i % 3 == 2)
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
