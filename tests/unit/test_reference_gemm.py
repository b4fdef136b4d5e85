"""The reference GEMM by its descriptors: blocks, address lists, workspaces, what is never read."""

from __future__ import annotations

from typing import Any

import kernelseam
import numpy as np
import pytest
from kernelseam import BatchedGemmPointers, BatchedGemmStrided, planning
from kernelseam.contract import PlanParts
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec
from kernelseam.dtypes import DType
from kernelseam.reference import gemm_blocks as reference
from kernelseam.reference.gemm import NumpyGemm
from traced_memory import peak_of

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(22)


def integers(*shape: int, dtype: Any = np.float32) -> Array:
    return RNG.integers(-3, 4, shape).astype(dtype)


def product(a: Array, b: Array) -> Array:
    return a.astype(np.float64) @ b.astype(np.float64)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that every problem has many, along every axis."""
    monkeypatch.setattr(reference, "_SIDE", 8)
    monkeypatch.setattr(reference, "_BLOCK", 3 * 8 * 8)
    planning.forget()


@pytest.mark.usefixtures("small_blocks")
def test_blocks_of_a_broadcast_operand() -> None:
    a, b, c = integers(40, 30), integers(5, 30, 20), np.empty((5, 40, 20), np.float32)
    kernelseam.plan(
        BatchedGemmStrided(A=a, B=b, C=c, M=40, N=20, K=30, batch=5, stride_a_batch=0)
    ).bind()()
    np.testing.assert_array_equal(c, product(a, b))


def test_lists_that_are_never_read_may_be_missing() -> None:
    c = [integers(4, 4) for _ in range(3)]
    expected = [2 * x for x in c]
    kernelseam.plan(
        BatchedGemmPointers(M=4, N=4, K=0, batch=3, C_ptrs=c, beta=2, dtype="float32")
    ).bind()()
    for actual, wanted in zip(c, expected, strict=True):
        np.testing.assert_array_equal(actual, wanted)


def build(**fields: Any) -> PlanParts:
    """What the reference builds for a pointer-list problem of these fields, on addresses of our
    own."""
    spec = GemmSpec(DType.float32, DType.float32, DType.float32, view="pointers")
    problem = GemmProblem(
        spec, a_strides=(0, 0, 4), b_strides=(0, 0, 4), c_strides=(0, 0, 4), **fields
    )
    return NumpyGemm().build(problem, kernelseam.devices()[-1])


def test_addresses_are_read_at_each_launch() -> None:
    x, y = [integers(4, 4) for _ in range(4)], [np.zeros((4, 4), np.float32) for _ in range(2)]
    lists = {
        name: np.array([m.ctypes.data for m in actual], np.uint64)
        for name, actual in (("A_ptrs", x[:2]), ("B_ptrs", x[2:]), ("C_ptrs", y))
    }
    parts = build(M=4, N=4, K=4, batch=2, num_heads=1)
    workspace = np.empty(parts.workspace_bytes, np.uint8)
    launch = parts.steps[0].bind(
        {n: p.ctypes.data for n, p in lists.items()}, workspace.ctypes.data
    )
    launch(0)
    np.testing.assert_array_equal(y[1], x[1] @ x[3])
    lists["A_ptrs"][:] = lists["A_ptrs"][::-1].copy()
    launch(0)
    np.testing.assert_array_equal(y[1], x[0] @ x[3])


def test_a_workspace_of_the_callers_own() -> None:
    a, b, c = (
        integers(70, 40, dtype=np.float16),
        integers(40, 30, dtype=np.float16),
        np.empty((70, 30), np.float16),
    )
    plan = kernelseam.plan(BatchedGemmStrided(A=a, B=b, C=c, M=70, N=30, K=40))
    size = plan.workspace_bytes
    memory = np.full(size + 96, 0xA5, np.uint8)
    for start in (-memory.ctypes.data % 16 + n for n in (0, 16, 48)):
        plan.bind(workspace=memory[start:].ctypes.data)()
        np.testing.assert_array_equal(c, product(a, b))
        assert (memory[start + size :] == 0xA5).all() and (memory[:start] == 0xA5).all()
        memory[:] = 0xA5


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_memory_is_bounded(dtype: str) -> None:
    for M, N, K, batch in ((10**5, 10**5, 10**5, 1), (32, 32, 32, 10**6), (1, 1, 10**8, 1)):
        descriptor = BatchedGemmStrided(M=M, N=N, K=K, batch=batch, beta=1, dtype=dtype)
        plan = kernelseam.plan(descriptor, backend="numpy")
        assert plan.workspace_bytes <= 34 * 2**20 * (2 if dtype == "float64" else 1)
    a, c = integers(2000, 1500, dtype=np.float16), np.empty((2000, 2000), np.float16)
    kernelseam.matmul2d(a[:50], a[:50], b_transposed=True, out=c[:50, :50])
    _, peak = peak_of(lambda: kernelseam.matmul2d(a, a, b_transposed=True, out=c))
    assert peak < 20 * 2**20
    np.testing.assert_array_equal(c[::97], product(a[::97], a.T).astype(np.float16))


def test_another_accumulator_is_refused() -> None:
    spec = GemmSpec(DType.float16, DType.float16, DType.float16)
    problem = GemmProblem(spec, 2, 2, 2, 1, 1, (4, 4, 2), (4, 4, 2), (4, 4, 2))
    refusal = NumpyGemm().supports(problem, kernelseam.devices()[-1])
    assert refusal == "accumulates in float32 or float64, not in float16"


def test_what_lies_as_blas_takes_it_needs_no_workspace() -> None:
    shape = {"M": 5, "N": 3, "K": 4}
    assert (
        planning.plan(BatchedGemmStrided(**shape, dtype="float32"), device="numpy").workspace_bytes
        == 0
    )
    assert (
        planning.plan(BatchedGemmStrided(**shape, dtype="float16"), device="numpy").workspace_bytes
        > 0
    )
