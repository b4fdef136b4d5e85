"""``bind(check=True)``: right results pass whatever their layout, wrong ones raise and name the
worst element."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import wrong_problem
from checked_cases import Spoiled, described, off
from kernelseam import Attention, AttentionPointers, BatchedGemmPointers, BatchedGemmStrided, plan
from kernelseam.contract import Device, OperandRule
from kernelseam.dtypes import DType
from kernelseam.errors import WrongResult
from kernelseam.oracle import check, sampling
from kernelseam.oracle.operands import Operands
from kernelseam.reference.runtime import HostRuntime
from kernelseam_thirdvendor import AcmeArray
from wrong_problem import WrongProblem

Discovered = Callable[..., Any]
RNG = np.random.default_rng(0)


def normal(*shape: int, dtype: Any = np.float32) -> Any:
    return RNG.standard_normal(shape).astype(dtype)


RIGHT = (
    "gemm-f32-nn-token-major-gaps",
    "gemm-f16-nt-b-group-2",
    "gemm-f32-nn-alpha-beta",
    "gemm-f32-nn-alpha-0-beta-half-nan-in",
    "gemm-f32-nn-sum-bias-residual",
    "gemm-f32-nn-sum-residual-in-place",
    "gemm-f32-nn-bias-residual-alpha-0-nan-in",
    "gemm-f16-nt-bias-residual-no-rows",
    "gemm-f32-nn-k-0-beta-half",
    "gemm-f32-nn-no-batch",
    "gemm-f32-nn-same-a-rows",
    "gemm-f32-nn-inf-in-a",
    "gemm-f32-nn-long-positive",
    "gemm-e4m3fn-nt",
    "gemm-e4m3fn-nt-blocks-group",
    "gemm-f16-nt-pointers-gaps-beta",
    "gemm-f32-nn-pointers-sum-bias-residual",
    "gemm-f16-nt-pointers-bias-residual-in-place",
    "gemm-f32-nn-pointers-alpha-0",
    "gemm-f32-nn-pointers-none",
    "grouped-gemm-bf16-m-nn-alpha-beta",
    "grouped-gemm-bf16-n-nn-alpha-beta",
    "grouped-gemm-bf16-k-tn-alpha-beta",
    "grouped-gemm-bf16-m-nn-rows",
    "grouped-lists-bf16-nn-alpha-beta",
    "attention-f16-64-gaps-bshd",
    "attention-f64-32-everything",
    "attention-bf16-128-everything",
    "attention-f16-64-causal-sequences-everything",
    "attention-f16-64-no-keys",
    "attention-f16-64-no-queries",
    "attention-f16-64-e4m3fn-blocks-ramp",
    "attention-f16-64-e4m3fn-pages-uneven-ramp",
    "attention-bf16-64-e4m3fn-sequences-blocks-ramp",
    "attention-f32-64-tf32-pointers",
    "attention-f16-64-pages-16",
    "paged-cache-append-bf16-e4m3-heads",
    "paged-cache-append-bf16-e4m3-everything",
    "paged-cache-gather-f16-e4m3-tokens",
    "qkv-projection-f16-rotary-halves-from-17",
    "qkv-projection-f16-rotary-pairs",
    "qkv-projection-f16-pages-24-rotary",
    "qkv-projection-f16-ragged-pages-cached-rotary",
    "qkv-projection-f16-pages-e4m3-heads",
    "qkv-projection-f16-ragged-pages-e4m3-tokens",
    "output-projection-f16-token-major-bias-residual",
    "output-projection-f16-in-place",
    "output-projection-f16-no-batch",
    "qkv-projection-bwd-bf16-bias",
    "qkv-projection-bwd-f16-d-bias-alone",
    "qkv-projection-bwd-f16-no-tokens",
    "output-projection-bwd-f32-bias",
    "output-projection-bwd-f16-d-weight-alone",
    "attention-bwd-f16-64-causal-ramp",
    "attention-bwd-bf16-128-everything",
    "attention-bwd-f64-32-everything",
    "attention-bwd-f16-64-causal-sequences-everything",
    "attention-bwd-f16-64-gqa-6-2",
    "attention-bwd-f16-64-causal-100x33",
    "attention-bwd-f16-64-no-keys",
    "attention-bwd-f16-64-no-queries",
    "attention-bwd-f16-64-no-batch",
    "attention-bwd-f16-64-no-heads-of-queries",
    "attention-bwd-f16-64-packed",
    "attention-bwd-f16-64-nan-in-dout",
    "attention-bwd-f16-64-bias-by-key",
    "attention-bwd-f16-64-bias-by-query",
    "attention-bwd-f16-64-bias-one",
    "attention-bwd-f16-64-bias-odd-transposed",
    "attention-bwd-f16-64-bias-no-keys",
    "attention-bwd-f16-64-sinks-huge-and-none",
    "attention-bwd-f16-64-lengths",
    "attention-bwd-f16-64-sequences-of-q-bias-any-order",
    "merge-states-f32-f16-parts-0",
    "merge-states-f32-f16-absent",
    "merge-states-f64-f64-apart",
    "merge-states-f32-f16-no-lse",
    "merge-states-f32-f16-no-rows",
)
"""Cases of the matrix: every operation, its views and options, and what is empty."""


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("name", RIGHT)
def test_right_results_pass(
    name: str, sampled: bool, discovered: Discovered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether all of them are looked at or a few."""
    discovered()
    if sampled:
        monkeypatch.setattr(sampling, "ORACLE_ROWS", 5)
    descriptor, kept = described(name)
    call = plan(descriptor, implementation="numpy").bind(check=True)
    call()
    call()  # of beta, the C of then is what counts
    call.rebind()()
    del kept


WRONG: dict[str, tuple[str, tuple[int, ...], str]] = {
    "gemm-f32-nn-token-major-gaps": ("C", (1, 2, 64, 71), "C[1, 2, 64, 71] is"),
    "gemm-f32-nn-alpha-beta": ("C", (0, 0, 1, 2), "C[0, 0, 1, 2] is"),
    "gemm-f32-nn-sum-bias-residual": ("C", (1, 1, 64, 71), "C[1, 1, 64, 71] is"),
    "gemm-f32-nn-pointers": ("C_ptrs", (0,), "C[1, 2, 0, 0] is"),
    "grouped-gemm-f32-k-tn": ("C", (2, 6, 5), "C[2, 6, 5] is"),
    "attention-f32-64-causal": ("out", (0, 1, 5, 63), "out[0, 1, 5, 63] is"),
    "attention-f64-32-everything": ("out", (1, 3, 32, 31), "out[1, 3, 32, 31] is"),
    "attention-f32-64-tf32-pointers": ("out_ptrs", (0,), "out["),
    "attention-f16-64-causal-sequences-everything": ("out", (0, 3, 30, 63), "out["),
    "qkv-projection-f32": ("q", (1, 3, 8, 7), "q[1, 3, 8, 7] is"),
    "output-projection-f16-in-place": ("out", (0, 0, 3, 5), "out[0, 0, 3, 5] is"),
    "qkv-projection-bwd-f32-bias": ("d_bias", (63,), "d_bias[63] is"),
    "output-projection-bwd-f32-bias": ("d_weight", (0, 0, 23, 31), "d_weight[0, 0, 23, 31] is"),
    "qkv-projection-f16-pages-24": ("k", (slice(None),), "k["),
    "qkv-projection-f16-ragged-pages-cached-rotary": ("v", (slice(None),), "v["),
    "qkv-projection-f16-ragged-pages-e4m3-tokens": ("k_scales", (slice(None),), "k_scales["),
}
"""Case → the result that is off, where, and what is found."""


@pytest.mark.parametrize("name", WRONG)
def test_one_element_that_is_off_is_found(name: str, discovered: Discovered) -> None:
    result, at, where = WRONG[name]
    descriptor, kept = described(name)
    operation = descriptor.problem().operation
    discovered().registry.implementations.append(Spoiled(operation, result, off(*at)))
    chosen = plan(descriptor, implementation="spoiled")
    with pytest.raises(WrongResult) as caught:
        chosen.bind(check=True)()
    e = caught.value
    assert e.finding.startswith(where), e.finding
    assert "the oracle says" in e.finding and "error/tolerance" in e.finding
    assert (e.implementation, e.device) == ("spoiled", "numpy:0 (cpu)")
    assert e.problem == chosen.problem
    again = pickle.loads(pickle.dumps(e))
    assert str(again) == str(e) and type(again) is WrongResult
    chosen.bind()()  # unasked, nothing is looked at
    del kept


@pytest.mark.parametrize("fault", wrong_problem.GEMM)
def test_faults_of_a_gemm(fault: str, discovered: Discovered) -> None:
    loaded = discovered()
    loaded.registry.implementations.append(WrongProblem("gemm", fault))
    pool, b, c = normal(2, 3, 9, 65), normal(4, 1, 33, 7), np.full((2, 3, 9, 7), np.nan, "f4")
    pool[..., 33:] = np.nan
    planned = plan(
        BatchedGemmStrided(
            A=pool[..., :33],
            B=b[:2],
            C=c,
            M=9,
            N=7,
            K=33,
            batch=2,
            num_heads=3,
            b_head_group=3,
            stride_a_batch=27 * 65,
            stride_a_head=9 * 65,
            stride_a_row=65,
        ),
        implementation=f"wrong-{fault}",
    )
    if fault == "right":
        planned.bind(check=True)()
        return
    with pytest.raises(WrongResult, match=f"^wrong-{fault} on numpy"):
        planned.bind(check=True)()


@pytest.mark.parametrize("fault", wrong_problem.ATTENTION)
def test_faults_of_an_attention(fault: str, discovered: Discovered) -> None:
    loaded = discovered()
    loaded.registry.implementations.append(WrongProblem("attention", fault))
    q, k, v = normal(2, 4, 33, 16), normal(2, 2, 99, 16), normal(2, 2, 99, 16)
    q[..., 0], k[..., 0] = 4, np.arange(99) / 16  # later keys weigh more
    given = Attention.from_arrays(
        q, k, v, np.empty_like(q), np.empty((2, 4, 33), "f4"), causal=True
    )
    planned = plan(given, implementation=f"wrong-{fault}")
    if fault == "right":
        planned.bind(check=True)()
        return
    with pytest.raises(WrongResult, match=f"^wrong-{fault} on numpy"):
        planned.bind(check=True)()


def test_on_another_vendors_memory(acme: Any) -> None:
    x = {n: AcmeArray(normal(2, 5, 5)) for n in "ABC"}
    planned = plan(BatchedGemmStrided(**x, M=5, N=5, K=5, batch=2, beta=1.0))
    assert planned.implementation == "acme-gemm"
    planned.bind(check=True)()
    planned.bind(
        check=True, **{n: a.host.ctypes.data for n, a in x.items()}
    )()  # addresses are enough
    lists = {f"{n}_ptrs": [AcmeArray(m) for m in reversed(a.host)] for n, a in x.items()}
    planned = plan(BatchedGemmPointers(**lists, M=5, N=5, K=5, batch=2))
    planned.bind(check=True)()


READ = HostRuntime.read


class Allocations(HostRuntime):
    """Host memory of which only what lies in one of ``known`` may be read."""

    def __init__(self, known: list[tuple[int, int]]) -> None:
        super().__init__()
        self.known, self.reads = known, 0

    def read(self, pointer: int, size: int, device: Device) -> Any:
        assert any(at <= pointer and pointer + size <= at + n for at, n in self.known), size
        self.reads += 1
        return READ(self, pointer, size, device)


class Lists:
    """Lists of matrices that are evenly spaced, each in an allocation of its own."""

    def __init__(self) -> None:
        self.known: list[tuple[int, int]] = []

    def __call__(self, *shape: int) -> list[Any]:
        """Two entries; what is between them is no allocation."""
        memory = np.full((2, 4096), np.nan, np.float32)
        entries = [m[: np.prod(shape)].reshape(shape) for m in memory]
        for x in entries:
            x[...] = normal(*shape)
            self.known.append((x.ctypes.data, x.nbytes))
        return entries


def over_lists(operation: str, entries: Lists) -> Any:
    if operation == "attention":
        heads = {f"{n}_ptrs": entries(5, 8) for n in ("q", "k", "v", "out")}
        return AttentionPointers(batch=1, num_heads=2, S_q=5, S_k=5, head_dim=8, **heads)
    x = {f"{n}_ptrs": entries(5, 5) for n in ("A", "B", "C", "residual")}
    return BatchedGemmPointers(**x, bias_ptrs=entries(5), M=5, N=5, K=5, batch=2, beta=1.0)


@pytest.mark.parametrize("operation", ["attention", "gemm"])
def test_nothing_between_the_entries_of_a_list_is_read(
    operation: str, discovered: Discovered, monkeypatch: pytest.MonkeyPatch
) -> None:
    discovered()
    entries = Lists()
    planned = plan(over_lists(operation, entries))
    assert not any(r.name.endswith("_ptrs") for r in planned.problem.operands)  # by strides
    call = planned.bind(check=True)
    allocations = Allocations(entries.known)
    monkeypatch.setattr(HostRuntime, "read", lambda _, *a: Allocations.read(allocations, *a))
    call()
    assert allocations.reads


@pytest.mark.parametrize(
    ("shape", "strides", "inner", "reads"),
    [
        ((3, 2, 5, 8), (80, 40, 8, 1), 2, 1),  # packed
        ((3, 2, 5, 8), (80, 8, 16, 1), 2, 1),  # token-major
        ((3, 2, 5, 8), (100, 8, 16, 1), 2, 3),
        ((3, 2, 5, 8), (110, 50, 10, 1), 2, 6),
        ((3, 2, 5, 8), (50, 160, 10, 1), 2, 6),
        ((3, 2, 5, 8), (40, 150, 8, 1), 2, 2),
        ((3, 2, 5, 8), (0, 50, 8, 1), 2, 2),
        ((3, 1, 5, 8), (40, 999, 8, 1), 2, 1),
        ((3, 2, 8), (30, 10, 1), 1, 6),
        ((3, 2, 8), (20, 10, 1), 2, 3),  # an array's rows
        ((2, 8), (10, 1), 2, 1),
    ],
)
def test_operands_with_gaps(
    shape: tuple[int, ...], strides: tuple[int, ...], inner: int, reads: int
) -> None:
    memory = normal(1000)
    expected = np.lib.stride_tricks.as_strided(memory, shape, [4 * s for s in strides])
    runtime = Allocations([(memory.ctypes.data, memory.nbytes)])
    operands = Operands({"x": memory.ctypes.data}, runtime, runtime.device)
    rule = OperandRule("x", DType.float32, shape, strides, 4, False)
    np.testing.assert_array_equal(operands.strided(rule, shape[0], inner), expected)
    assert runtime.reads == reads


def test_large_results_are_sampled(discovered: Discovered, monkeypatch: pytest.MonkeyPatch) -> None:
    discovered()
    requested: list[Any] = []
    real = check.gemm
    monkeypatch.setattr(sampling, "ORACLE_OPERATIONS", 1e6)
    monkeypatch.setattr(
        check, "gemm", lambda *a, **k: requested.append(real(*a, **k)) or requested[-1]
    )
    x = {"A": normal(500, 100), "B": normal(100, 50), "C": normal(500, 50)}
    plan(BatchedGemmStrided(**x, M=500, N=50, K=100)).bind(check=True)()
    (verdict,) = requested
    assert verdict.passed and verdict.checked == 64 * 50
