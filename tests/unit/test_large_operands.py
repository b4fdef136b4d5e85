"""The reference on operands of more than 2³¹ elements, and on more matrices than a grid's dimension
holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from far_operands import FAR, hold
from kernelseam import BatchedGemmStrided, bmm, plan


@pytest.mark.parametrize("name", FAR)
def test_one_operand_spans_more_than_2_31_elements(name: str) -> None:
    def bind(descriptor: BatchedGemmStrided, **arrays: Any) -> Any:
        return plan(descriptor, device="numpy").bind(
            **{n: x.ctypes.data for n, x in arrays.items()}
        )

    hold(name, bind)


@pytest.mark.parametrize("summed", [False, True])
def test_more_matrices_than_65535(summed: bool) -> None:
    count = 70_000
    a, b = np.ones((count, 1, 2), np.float32), np.ones((count, 2, 1), np.float32)
    a[-1], bias = 5, np.arange(count, dtype=np.float32)[:, None]
    if not summed:
        y = bmm(a, b, bias=bias)
        np.testing.assert_array_equal(
            y[:, 0], 2 + bias + np.where(np.arange(count) == count - 1, 8, 0)[:, None]
        )
        return
    c = np.empty((2, 1, 1), np.float32)
    plan(
        BatchedGemmStrided(A=a, B=b, C=c, M=1, N=1, K=2, batch=count, c_batch_group=count // 2)
    ).bind()()
    assert c.ravel().tolist() == [count, count + 8]
