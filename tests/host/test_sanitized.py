"""Cases as executables: sanitizers find nothing in the shared kernels. What is planted they find:
test_mutants.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest
from kernelseam.contract import Device
from kernelseam.parity.matrix import named
from kernelseam.samples.common import DECODE, UNFUSED
from kernelseam_hostcpp.executable import Report, run
from kernelseam_hostcpp.runtime import DEVICES
from mutant import SANITIZED, SANITIZED_DECODE, SANITIZED_UNFUSED

MORE = (
    "gemm-f16-tn-unaligned",
    "gemm-f16-nn-alpha-beta",
    "gemm-f16-nt-odd-c",
    "gemm-bf16-nn-ragged-17x65x257",
    "gemm-f16-nt-to-f32",
    "gemm-f32-nt",
    "gemm-f32-nn-gaps-beta",
    "gemm-f64-tt-pointers",
    "gemm-f16-nt-b-group-2",
    "attention-f16-16",
    "attention-f16-32v80",
    "attention-f16-256",
    "attention-bf16-256-causal",
    "attention-f32-40",
    "attention-f16-64-causal-masked-rows",
    "attention-f16-64-no-keys",
    "attention-f16-64-odd-rows",
    "attention-f16-64-packed",
    "attention-f16-64-minus-inf-all",
    "attention-f32-64-causal-nan-in-hidden-k",
    "attention-f16-40-causal-odd",
    "attention-f16-64-everything",
    "attention-f16-64-mask-odd-transposed",
    "attention-f16-64-prefix-window",
    "attention-f16-64-causal-pages-48-window-sinks",
    "attention-f32-64-causal-pages-16",
    "attention-bf16-128-causal-pages-48-gqa",
    "attention-f16-64-causal-pages-16-sequences",
    "attention-f16-64-split-pages",
    "attention-f16-64-split-value-dim-40",
    "attention-f16-64-causal-split-sequences",
    "attention-f32-64-split",
    "attention-bf16-576v512-causal-mqa",
    "attention-f16-64-to-f32",
    "merge-states-f32-f16",
    "merge-states-f32-f32-dim-33",
    "merge-states-f32-bf16-dim-512",
    "attention-bwd-f16-64-gqa-6-2",
    "attention-bwd-f16-64-softcap-5",
    "attention-bwd-f16-64-lengths",
    "attention-bwd-f16-64-odd",
    "attention-bwd-f16-64-bias-odd-transposed",
    "attention-bwd-f16-256",
    "attention-bwd-f32-128v40-causal",
    "attention-bwd-bf16-128-causal-sequences",
    "attention-bwd-f16-64-sinks",
)


def _under(device: Device, sanitizer: str, often: bool, *name: str) -> object:
    slow = pytest.mark.slow("another way to copy, or more of the same views")
    return pytest.param(
        *name,
        device,
        sanitizer,
        id="-".join((*name, device.arch, sanitizer)),
        marks=[slow] * (not often),
    )


WAYS = tuple((d, s) for d in DEVICES for s in ("thread", "address"))
TURNS = ((DEVICES[0], "thread"), (DEVICES[0], "address"), (DEVICES[1], "thread"))
"""Of every third case every run of the tests takes one of these, of the next of them the next."""


def _runs() -> Iterator[object]:
    for i, n in enumerate((*SANITIZED, *MORE)):
        turn = TURNS[i // 3 % len(TURNS)]
        for way in WAYS:
            yield _under(*way, n in SANITIZED and i % 3 == 0 and way == turn, n, "shared")
    # three launches, one after the other; blocks one after the other, of which the last joins
    for implementation, names in ((UNFUSED, SANITIZED_UNFUSED), (DECODE, SANITIZED_DECODE)):
        for (i, n), way in product(enumerate(names), WAYS):
            yield _under(*way, way == TURNS[i % 2], n, implementation)


@pytest.fixture(scope="module")
def reports(
    ahead: Callable[..., Callable[[pytest.Item], Report]],
) -> Callable[[pytest.Item], Report]:
    return ahead(
        "test_nothing_is_found",
        lambda name, implementation, device, sanitizer: run(
            named(name), device, sanitizer, implementation=implementation
        ),
    )


@pytest.mark.parametrize(("name", "implementation", "device", "sanitizer"), list(_runs()))
def test_nothing_is_found(
    request: pytest.FixtureRequest,
    reports: Callable[[pytest.Item], Report],
    has_sanitizer: Callable[[str], None],
    name: str,
    implementation: str,
    device: Device,
    sanitizer: str,
) -> None:
    has_sanitizer(sanitizer)
    report = reports(request.node)
    assert report.findings == (), report.log
    assert report.verdict is not None and report.verdict.passed, report.verdict
