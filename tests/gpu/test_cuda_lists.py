"""Products over lists by Hopper's GEMM: matrices below, above and far from where its tensor maps
begin, with tiles that reach beyond every edge."""

from __future__ import annotations

import kernelseam as ks
import numpy as np
import pytest
from nvidia_gpu import DEVICE, cupy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE.arch != "sm_90a", reason=f"{DEVICE.arch} has not that kernel"),
]
M, N, K, COUNT = 200, 136, 72, 6
BLOCK = 1 << 20


@pytest.mark.parametrize("beta", [0.0, -0.5])
def test_matrices_on_both_sides_of_the_origin(beta: float) -> None:
    memory = (
        cupy.random.default_rng(1)
        .standard_normal(40 * BLOCK // 2, dtype=cupy.float32)
        .astype(cupy.float16)
    )
    base, middle = memory.data.ptr, memory.data.ptr + 20 * BLOCK
    # Of each list half lies below the workspace, half above, in no order.
    order = [3, 25, 9, 33, 14, 37]
    starts = {
        name: [base + (n * BLOCK + i * BLOCK // 4) for n in order] for i, name in enumerate("ABCR")
    }

    def matrix(address: int, rows: int, columns: int) -> object:
        at = (address - base) // 2
        return memory[at : at + rows * columns].reshape(rows, columns)

    expected = []
    for a, b, c, r in zip(*(starts[n] for n in "ABCR"), strict=True):
        product = matrix(a, M, K).astype(cupy.float64) @ matrix(b, N, K).astype(cupy.float64).T
        expected.append(
            product
            + beta * matrix(c, M, N).astype(cupy.float64)
            + matrix(r, M, N).astype(cupy.float64)
        )
    plan = ks.plan(
        ks.BatchedGemmPointers(
            M=M,
            N=N,
            K=K,
            batch=COUNT,
            b_transposed=True,
            beta=beta,
            dtype="float16",
            dtype_residual="float16",
            A_ptrs=starts["A"],
            B_ptrs=starts["B"],
            C_ptrs=starts["C"],
            residual_ptrs=starts["R"],
        ),
        device=DEVICE,
        implementation="sm90",
    )
    before = memory.copy()
    plan.bind(workspace=middle)()
    cupy.cuda.runtime.deviceSynchronize()
    for address, reference in zip(starts["C"], expected, strict=True):
        actual = matrix(address, M, N).astype(cupy.float64)
        assert float(cupy.linalg.norm(actual - reference) / cupy.linalg.norm(reference)) < 8e-4
        at = (address - base) // 2
        before[at : at + M * N] = memory[at : at + M * N]
    assert cupy.array_equal(before.view(np.uint16), memory.view(np.uint16)), (
        "nothing beside the results was written"
    )
