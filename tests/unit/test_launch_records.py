"""What a problem would launch, told without compiling: by implementations, and by ``kernelseam
explain``."""

from __future__ import annotations

from typing import Any

import pytest
from command_line import Command
from kernelseam import Attention, AttentionBwd
from kernelseam.contract import LaunchRecord
from kernelseam.kernels import KernelImplementation, shared_implementations
from kernelseam_thirdvendor import AcmeGemm

pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
from h200_rows import H200, HOPPER  # noqa: E402
from kernelseam_cuda.plugin import backend  # noqa: E402

CUDA = backend()
assert CUDA.toolchain is not None
IMPLEMENTATIONS: dict[tuple[str, str], Any] = {
    (i.operation, i.name): i
    for i in (
        *shared_implementations(CUDA.toolchain),
        *(KernelImplementation(k, CUDA.toolchain) for k in CUDA.kernels),
    )
}


def test_a_products_cluster_and_its_variants() -> None:
    row = next(r for r in HOPPER if "512×6144" in r.name)
    implementation = IMPLEMENTATIONS["gemm", "sm90"]
    (record,) = implementation.records(row.problem, H200)
    assert (record.kernel, record.kind, record.arch) == ("gemm_sm90", "kernel", "sm_90a")
    assert (record.grid, record.block, record.cluster) == ((128, 1, 1), (384, 1, 1), (2, 1, 1))
    (other,) = implementation.records(row.problem, H200, "64x64-4-rows-3blocks")
    assert (other.grid, other.block, other.cluster) == ((396, 1, 1), (256, 1, 1), (1, 1, 1))


def test_memory_that_is_set_is_a_launch() -> None:
    forward = Attention(
        batch=1, num_heads=2, S_q=256, S_k=256, head_dim=64, causal=True, dtype="bfloat16", lse=0
    )
    problem = AttentionBwd(forward=forward, deterministic=False).problem()
    actual = IMPLEMENTATIONS["attention_bwd", "shared"].records(problem, H200)
    kinds = [x.kind for x in actual]
    assert kinds.count("kernel") >= 2 and set(kinds) <= {"kernel", "memset"}
    assert all(x.kernel for x in actual)


def test_nothing_to_do_is_no_launch() -> None:
    problem = Attention(batch=0, num_heads=2, S_q=8, S_k=8, head_dim=64, dtype="float16").problem()
    assert IMPLEMENTATIONS["attention", "shared"].records(problem, H200) == ()


def test_explain_shows_what_is_launched(
    command: Command, acme: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = (
        LaunchRecord("memset", (1, 1, 1), (1, 1, 1), 0, "acme1", "memset"),
        LaunchRecord("rows", (12, 1, 1), (64, 1, 1), 2048, "acme1", cluster=(2, 1, 1)),
    )
    monkeypatch.setattr(
        AcmeGemm, "records", lambda self, problem, device, variant: reported, raising=False
    )
    status, out, err = command("explain", "gemm", "--backend", "acme")
    assert (status, err) == (0, "")
    assert (
        "launches of the chosen" in out and "12×1×1" in out and "2×1×1" in out and "memset" in out
    )
    monkeypatch.setattr(AcmeGemm, "records", None)
    assert "launches of the chosen" not in command("explain", "gemm", "--backend", "acme")[1]
