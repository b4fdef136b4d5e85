"""GEMV on the host platform: every case of the matrix that it takes."""

from __future__ import annotations

import pytest
from kernelseam.contract import Device
from kernelseam.kernels import GEMV
from kernelseam.parity.matrix import matrix
from kernelseam.plugins import Plugins
from kernelseam_hostcpp import HostToolchain
from kernelseam_hostcpp.executable import problem_of
from kernelseam_hostcpp.runtime import DEVICES
from own_cases import own_cases, require_passed

ROW = HostToolchain().arch_row(DEVICES[0].arch)
TAKEN = tuple(
    c.name
    for c in matrix()
    if c.operation == "gemm"
    and c.batch * c.num_heads < 2000
    and GEMV.refuse(problem_of(c, DEVICES[0]), ROW) is None
)
OFTEN = {
    "gemm-f16-nt-1-rows",
    "gemm-f16-nn-3-rows-beta",
    "gemm-f16-nt-3-columns-beta",
    "gemm-f16-nn-1-column-group",
    "gemm-bf16-nt-4-rows-pointers",
    "gemm-f16-tn-4-columns-pointers",
    "gemm-f64-tt-4-columns",
    "gemm-f32-tn-3-rows",
    "gemm-f16-nt-ragged-1x129x64",
    "gemm-f32-nn-no-rows",
}


@pytest.mark.parametrize(("name", "device"), own_cases(TAKEN, OFTEN))
def test_parity(hostcpp: Plugins, name: str, device: Device) -> None:
    require_passed(name, device, GEMV.name)


def test_the_cases_that_are_run_often_are_there() -> None:
    assert set(TAKEN) >= OFTEN and len(TAKEN) > 50
