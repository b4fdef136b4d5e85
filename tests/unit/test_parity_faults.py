"""Every kind of fault is caught by a named case, which the right implementation passes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from calibration import tile_model
from kernelseam.contract import Device
from kernelseam.parity.matrix import named
from kernelseam.parity.running.run import Outcome, Target, run_case
from kernelseam.planning import forget
from kernelseam.plugins import plugins

ATTENTION = {
    "dropped-last-key": "attention-f16-64-no-lse-ramp",
    "causal-off-by-one": "attention-f16-64-causal-no-lse-ramp",
    "causal-one-short": "attention-f16-64-causal-no-lse-ramp",
    "causal-top-left": "attention-f16-64-causal-7x129",
    "wrong-kv-head": "attention-f16-64-gqa-6-2",
    "missed-rescale": "attention-f16-64-climbing",
    "unmasked-tail": "attention-f32-64-no-lse",
    "hidden-times-zero": "attention-f16-64-causal-nan-in-hidden-v",
    "no-maximum": "attention-f32-64-falling",
    "empty-row-divides": "attention-f16-64-causal-masked-rows",
    "half-scores": "attention-f16-64-extreme",
    "default-scale": "attention-f16-64-scale-negative",
    "lse-base-2": "attention-f16-64",
    "writes-past-end": "attention-f16-64-gaps",
}
GEMM = {
    "unmasked-k-tail": "gemm-f16-nt",
    "dropped-last-k": "gemm-f16-nt-integers",
    "beta-read-at-0": "gemm-f16-nn-beta-0-nan-in-c",
    "alpha-0-multiplies": "gemm-f32-nn-alpha-0-beta-half-nan-in",
    "wrong-b-head": "gemm-bf16-nn-b-group-2",
    "half-sums": "gemm-f16-nt-to-f32",
    "truncates": "gemm-bf16-nt-integers-rounded",
    "short-inputs": "gemm-f32-nn",
    "shorter-tf32": "gemm-f32-nt-tf32-one-product",
    "unsplit-tf32x3": "gemm-f32-nn-tf32x3",
    "one-cross-term": "gemm-f32-nn-tf32x3",
    "infinite-parts": "gemm-f32-nn-tf32x3-inf-in-a",
    "writes-past-end": "gemm-f16-nt-gaps",
    "no-batch-stride": "gemm-f32-nn-token-major-in",
    "bias-by-row": "gemm-f16-nt-bias",
    "wrong-bias-head": "gemm-f16-nt-bias-residual",
    "scaled-residual": "gemm-f16-nt-bias-residual-alpha-beta",
    "residual-walked-as-c": "gemm-f16-nt-bias-residual-gaps",
    "residual-after-rounding": "gemm-bf16-nn-bias-f32-residual-rounded",
    "dropped-last-product": "gemm-f16-nt-sum-batch",
    "first-head-of-b": "gemm-f16-nt-sum-4-of-b-group-2",
    "interleaved-sums": "gemm-f16-nt-sum-both",
}
FAULTS = [("attention", f, c) for f, c in ATTENTION.items()] + [
    ("gemm", f, c) for f, c in GEMM.items()
]


@pytest.fixture
def host() -> Iterator[Device]:
    results = plugins().registry.implementations
    kept = list(results)
    yield plugins().backend("numpy").runtime.devices()[0]
    results[:] = kept
    forget()


def _run(host: Device, operation: str, fault: str, name: str) -> Outcome:
    implementation = tile_model.TileModel(operation, fault)
    plugins().registry.add_implementation(implementation)
    return run_case(named(name), Target(host, implementation.name, operation, builtin=True))


def test_every_fault_has_its_case() -> None:
    assert set(ATTENTION) == set(tile_model.ATTENTION_FAULTS)
    assert set(GEMM) == set(tile_model.GEMM_FAULTS)


@pytest.mark.parametrize(
    ("operation", "fault", "name"), FAULTS, ids=[f"{o}-{f}" for o, f, _ in FAULTS]
)
def test_fault_is_caught(host: Device, operation: str, fault: str, name: str) -> None:
    right = _run(host, operation, "", name)
    assert right.status == "passed", right.detail
    wrong = _run(host, operation, fault, name)
    assert wrong.status == "failed", wrong.detail
    assert wrong.verdict is not None and wrong.verdict.worst > 4
    with pytest.raises(AssertionError, match=f"{name} on numpy-model-{fault}: "):
        wrong.require()
