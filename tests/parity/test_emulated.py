"""A covering choice of cases on every emulated AMD device, where KERNELSEAM_TINYGRAD names the
emulator. Each operand is an allocation of its own that ends at a guard page: a read behind a last
row ends the launch."""

from __future__ import annotations

from typing import Any

import pytest
from kernelseam import planning
from kernelseam.contract import EMULATED, Device
from kernelseam.errors import CompileError
from kernelseam.parity.matrix import named
from kernelseam.parity.running.run import Outcome, run_case, targets
from kernelseam.plugins import plugins

plugin = pytest.importorskip(
    "kernelseam_rocm.plugin", reason="hiprtc is missing: kernelseam-rocm is not installed"
)
from kernelseam_rocm_emulator import checkout  # noqa: E402

FOUND = checkout.find()
if not isinstance(FOUND, checkout.Checkout):
    pytest.skip(f"no emulator: {FOUND}", allow_module_level=True)
TOOLCHAIN: Any = plugin.backend().toolchain
try:
    TOOLCHAIN.compiler()
except CompileError as e:
    pytest.skip(f"hiprtc is missing: {e.log}", allow_module_level=True)

from mutant import Mutant  # noqa: E402

DEVICES = [d for d in plugins().backend("rocm").runtime.devices() if d.evidence == EMULATED]
CASES = (
    "gemm-f16-nt",
    "gemm-f16-tn",
    "gemm-bf16-nn-ragged-65x129x7",
    "gemm-f16-nt-unaligned",
    "gemm-f32-nn",
    "gemm-f16-nt-pointers",
    "gemm-f16-nt-sum-both",
    "gemm-f16-nt-310-of-13x11x9-bias-residual",
    "attention-f16-64-causal-65x65",
    "attention-bf16-128",
    "attention-f32-64-causal",
    "attention-f16-64-everything",
    "attention-f16-64-pages-16",
    "attention-f16-64-causal-sequences-gqa",
    "attention-f16-64-split-pages",
    "attention-bwd-f16-64-gqa-6-2",
    "attention-bwd-f16-64-causal-any-order",
    "attention-bwd-f16-64-bias-voids",
    "merge-states-f32-f16",
    "qkv-projection-f16-rotary-halves",
    "qkv-projection-f16-pages-24-rotary",
    "output-projection-f16-bias-residual",
    "qkv-projection-bwd-f16-bias",
    "output-projection-bwd-f16-bias",
)
"""Of every operation: dtypes, transposes, views of memory, options, teams, atomics, several
launches."""


def _run(name: str, device: Device) -> Outcome:
    case = named(name)
    target = next(
        t
        for t in targets(device=device)
        if (t.operation, t.implementation) == (case.operation, "shared")
    )
    return run_case(case, target, separate=True)


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.arch)
@pytest.mark.parametrize("name", CASES)
def test_a_covering_choice(name: str, device: Device) -> None:
    _run(name, device).require()


BEYOND = (
    Mutant(
        "rows-beyond-the-last",
        "copy.h",
        "min_of(mine.row(i) + j, rows_left - 1)",
        "mine.row(i) + j",
        "gemm-f16-nt",
        "",
        "rows behind an operand's last one are read",
    ),
    Mutant(
        "chunks-beyond-the-end",
        "copy.h",
        "EXACT ? column : min_of(column, cols_left - V)",
        "column",
        "gemm-f16-nt",
        "",
        "chunks behind a row's end are read",
    ),
)


@pytest.mark.parametrize(
    "device", [d for d in DEVICES if d.arch in ("gfx942", "gfx1100")], ids=lambda d: d.arch
)
@pytest.mark.parametrize("mutant", BEYOND, ids=lambda m: m.name)
def test_a_read_behind_an_operand_ends_at_its_guard(
    mutant: Mutant, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = mutant.planted(dict(TOOLCHAIN.platform_files(device.arch)))
    monkeypatch.setattr(TOOLCHAIN, "platform_files", lambda arch: planted)
    planning.forget()
    try:
        outcome = _run(mutant.case, device)
    finally:
        planning.forget()
    assert outcome.status == "error", outcome.detail
    assert "DeviceError: kernel gemm on " in outcome.detail, outcome.detail
    assert " behind the end of an allocation of device memory" in outcome.detail, outcome.detail
