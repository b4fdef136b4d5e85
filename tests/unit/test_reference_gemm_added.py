"""The reference GEMM with a bias, a residual and sums: their order, rounding, and what is never
read. The matrix and test_random_problems.py have its results."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernelseam import BatchedGemmStrided, plan
from kernelseam.contract import Device
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec, HeadsSpec
from kernelseam.dtypes import DType
from kernelseam.reference.gemm import NumpyGemm

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(40)


def integers(*shape: int, dtype: Any = np.float32) -> Array:
    return RNG.integers(-3, 4, shape).astype(dtype)


def test_sums_go_by_batch_then_by_head() -> None:
    """In float32, where the order shows: 2²⁴ + 1 + 1 is 2²⁴, 1 + 1 + 2²⁴ is 2²⁴ + 2."""
    big = 2.0**24
    for values, expected in (
        (((big, 1.0), (1.0, -big)), 0.0),
        (((1.0, 1.0), (big, 0.0)), big + 2),
        (((big, 1.0), (1.0, 0.0)), big),
    ):
        a, b = np.array(values, np.float32).reshape(2, 2, 1, 1), np.ones((2, 2, 1, 1), np.float32)
        c = np.empty((1, 1, 1, 1), np.float32)
        plan(
            BatchedGemmStrided(
                A=a, B=b, C=c, M=1, N=1, K=1, batch=2, num_heads=2, c_batch_group=2, c_head_group=2
            )
        ).bind()()
        assert c.item() == expected


def test_what_is_added_is_rounded_with_the_sum() -> None:
    """In float16 2049 would be 2048 before 1 is added."""
    a, b, c = (
        np.full((1, 1), 2048, np.float16),
        np.ones((1, 1), np.float16),
        np.empty((1, 1), np.float16),
    )
    one = np.ones(1, np.float16)
    plan(BatchedGemmStrided(A=a, B=b, C=c, bias=one, residual=one[None], M=1, N=1, K=1)).bind()()
    assert c.item() == 2050


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_inputs_that_are_never_read_may_be_missing(dtype: Any) -> None:
    c, bias, residual = (
        np.full((2, 3, 4), np.nan, dtype),
        integers(4, dtype=dtype),
        integers(2, 3, 4, dtype=dtype),
    )
    plan(
        BatchedGemmStrided(
            C=c,
            bias=bias,
            residual=residual,
            M=3,
            N=4,
            K=5,
            batch=4,
            c_batch_group=2,
            alpha=0,
            dtype=c.dtype,
            stride_bias_batch=0,
        )
    ).bind()()
    np.testing.assert_array_equal(c, bias + residual)


def test_memory_is_bounded_and_sums_launch_once() -> None:
    d = BatchedGemmStrided(
        M=500,
        N=500,
        K=10**6,
        batch=10**4,
        c_batch_group=10**4,
        bias=0,
        residual=0,
        dtype="float16",
        beta=1,
    )
    planned = plan(d, backend="numpy")
    assert planned.workspace_bytes <= 34 * 2**20
    assert [r.kernel for r in planned.launches] == ["numpy_gemm"]


def test_heads_are_refused() -> None:
    spec = GemmSpec(DType.float32, DType.float32, DType.float32, heads=HeadsSpec())
    problem = GemmProblem(spec, 2, 2, 2, 1, 1, (4, 4, 2), (4, 4, 2), (4, 4, 2))
    output = NumpyGemm().supports(problem, Device("numpy", 0, "cpu"))
    assert output == "has no heads, which are a projection's"
