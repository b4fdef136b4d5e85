"""Cases as executables under sanitizers: nothing is found in the shared kernels, every planted fault is."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from kernelseam.contract import Device
from kernelseam.parity.cases import named
from kernelseam_hostcpp.executable import changed, run
from kernelseam_hostcpp.runtime import DEVICES

HOST, REGISTERS = DEVICES
OPTION = {"thread": "thread", "address": "address,undefined"}

COVERING = (
    "gemm-f16-nt", "gemm-bf16-tn", "gemm-f32-nn-unaligned", "gemm-f64-tn", "gemm-f32-nn-pointers",
    "gemm-f32-nn-k-0-beta-half", "attention-f16-64-causal-65x65", "attention-bf16-128-causal-nan-in-hidden-v",
    "attention-f32-64-causal", "attention-f16-192v128", "attention-f16-64-odd",
)
MORE = (
    "gemm-f16-tn-unaligned", "gemm-f16-nn-alpha-beta", "gemm-f16-nt-odd-c", "gemm-bf16-nn-ragged-17x65x257",
    "gemm-f16-nt-to-f32", "gemm-f32-nt", "gemm-f32-nn-gaps-beta", "gemm-f64-tt-pointers", "gemm-f16-nt-b-group-2",
    "attention-f16-16", "attention-f16-32v80", "attention-f16-256", "attention-bf16-256-causal", "attention-f32-40",
    "attention-f16-64-causal-masked-rows", "attention-f16-64-no-keys", "attention-f16-64-odd-rows",
    "attention-f16-64-packed", "attention-f16-64-minus-inf-all", "attention-f32-64-causal-nan-in-hidden-k",
    "attention-f16-40-causal-odd",
)


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.arch)
@pytest.mark.parametrize("name", [*COVERING, *(pytest.param(n, marks=pytest.mark.slow) for n in MORE)])
def test_nothing_is_found(has_sanitizer: Callable[[str], None], name: str, device: Device, sanitizer: str) -> None:
    has_sanitizer(OPTION[sanitizer])
    report = run(named(name), device, sanitizer)
    assert report.findings == (), report.log
    assert report.verdict is not None and report.verdict.passed, report.verdict


GEMM, ATTENTION, SIMT = "gemm/gemm.h", "attention/forward.h", "tile/simt.h"
READY = "block_barrier();  // this slice is visible to all, and the stage refilled below is no longer read"
NOT_A_NUMBER = r"is nan, the oracle says"
"""What results say that were computed from memory in flight."""


@dataclass(frozen=True)
class Fault:
    """A change of a shared source, and what it is reported as on which archs: a finding of a sanitizer ("data race",
    …), or words of the verdict. On the other archs it does no harm."""

    case: str
    file: str
    old: str
    new: str
    sanitizer: str
    reported: str
    archs: tuple[str, ...] = ("host", "host-registers")


FAULTS = {
    # A barrier missing.
    "gemm-slice-not-visible": Fault(
        "gemm-f16-nt", GEMM, "block_barrier();  // this slice", "// this slice", "thread", "data race"
    ),
    "gemm-one-stage-overwritten": Fault(
        "gemm-f16-nt", GEMM, "if (STAGES == 1) block_barrier();", "", "thread", "data race", ("host-registers",)
    ),
    "gemm-result-not-visible-to-the-warp": Fault(
        "gemm-f16-nt", GEMM, "E::to_shared(out, acc);\n    warp_barrier();", "E::to_shared(out, acc);", "thread",
        "data race",
    ),
    "gemm-last-result-overwritten": Fault(
        "gemm-f32-nn-k-0-beta-half", GEMM, "if (KS_PERSISTENT) warp_barrier();", "if (KS_PERSISTENT) {}", "thread",
        "data race",
    ),
    "gemm-ring-overwritten-by-the-result": Fault(
        "gemm-f16-nt", GEMM, "else block_barrier();  // the ring", "else {}  // the ring", "thread", "data race",
        ("host-registers",),
    ),
    "attention-tile-not-visible": Fault(
        "attention-f16-64-causal-65x65", ATTENTION, "block_barrier();  // this tile", "// this tile", "thread",
        "data race",
    ),
    "attention-queries-not-visible": Fault(
        "attention-bf16-128", ATTENTION, "copies_wait<AHEAD>();\n  block_barrier();", "copies_wait<AHEAD>();",
        "thread", "data race",
    ),
    "attention-queries-overwritten": Fault(
        "attention-f16-192v128", ATTENTION, "block_barrier();  // the queries", "// the queries", "thread", "data race"
    ),
    "attention-probabilities-not-visible": Fault(
        "attention-f32-64-causal", SIMT, "to_shared(t, a);\n    warp_barrier();", "to_shared(t, a);", "thread",
        "data race",
    ),
    # Too early a copy.
    "gemm-refilled-while-read": Fault(
        "gemm-f16-nt", GEMM, READY + "\n      fetch();", "fetch();\n      " + READY, "thread", "data race", ("host",)
    ),
    # A wait missing, or one too few: of no account where copies go through registers.
    "gemm-wait-off-by-one": Fault(
        "gemm-f16-nt", GEMM, "copies_wait<AHEAD - 1>", "copies_wait<AHEAD>", "none", NOT_A_NUMBER, ("host",)
    ),
    "attention-wait-off-by-one": Fault(
        "attention-f16-64", ATTENTION, "copies_wait<AHEAD - 1>", "copies_wait<AHEAD>", "none", NOT_A_NUMBER, ("host",)
    ),
    "attention-queries-not-waited-for": Fault(
        "attention-bf16-128", ATTENTION, "copies_wait<AHEAD>();\n", "", "none",
        "hold what memory starts with: never written, or computed from memory outside the operands", ("host",),
    ),
    "attention-not-landed": Fault(
        "attention-f16-64", ATTENTION, "copy_v.land(tile_v(stage));", "", "none", NOT_A_NUMBER, ("host-registers",)
    ),
    # A row too many.
    "gemm-row-read": Fault(
        "gemm-f16-nt", GEMM, "A, m0, M, k0, K)", "A, m0, M + 1, k0, K)", "address", "heap-buffer-overflow"
    ),
    "gemm-row-written": Fault(
        "gemm-f16-nt", GEMM, "row0, M, col0, N);", "row0, M + 1, col0, N);", "address", "heap-buffer-overflow"
    ),
    "attention-key-read": Fault(
        "attention-f16-64", ATTENTION, "tile * BN, S_k, 0, KS_DQK", "tile * BN, S_k + 1, 0, KS_DQK", "address",
        "heap-buffer-overflow",
    ),
    "attention-lse-written": Fault(
        "attention-f16-64", ATTENTION, "if (row0 + i < S_q) rows", "if (row0 + i <= S_q) rows", "address",
        "heap-buffer-overflow",
    ),
    "gemm-result-beyond-shared-memory": Fault(
        "gemm-f16-nt", GEMM, "RESULT + warp_index() * TileC", "RESULT + (warp_index() + 1) * TileC", "address",
        "heap-buffer-overflow", ("host",),
    ),
    # Ways that part.
    "gemm-a-lane-leaves": Fault(
        "gemm-f16-nt", GEMM, "E::to_shared(out, acc);", "if (lane() == 3) return;\n    E::to_shared(out, acc);",
        "none", r"block 0, warp [0-3]: lanes wait at a warp barrier and the end",
    ),
    "gemm-a-warp-leaves": Fault(
        "gemm-f16-nt", GEMM, "      fetch();\n", "      fetch();\n      if (warp_index() == 1) return;\n", "none",
        r"block 0, warp [0-3]: warps wait at a block barrier and the end",
    ),
}


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.arch)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_reported(has_sanitizer: Callable[[str], None], name: str, device: Device) -> None:
    fault = FAULTS[name]
    if fault.sanitizer in OPTION:
        has_sanitizer(OPTION[fault.sanitizer])
    report = run(named(fault.case), device, fault.sanitizer, changed(fault.file, fault.old, fault.new))
    if device.arch not in fault.archs:
        assert report.findings == () and report.verdict is not None and report.verdict.passed
    elif report.findings:
        assert re.fullmatch(fault.reported, report.findings[0]), report.log
    else:
        assert fault.sanitizer == "none" and report.verdict is not None and not report.verdict.passed
        assert re.search(fault.reported, report.verdict.message), report.verdict.message
