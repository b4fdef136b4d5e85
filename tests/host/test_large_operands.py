"""The shared GEMM on operands of more than 2³¹ elements, all of whose offsets are 64-bit, and on
more matrices than a grid's dimension holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from far_operands import FAR, hold
from kernelseam import BatchedGemmPointers, BatchedGemmStrided, plan, trace
from kernelseam.plugins import Plugins


@pytest.mark.parametrize("name", FAR)
def test_one_operand_spans_more_than_2_31_elements(hostcpp: Plugins, name: str) -> None:
    def bind(descriptor: BatchedGemmStrided, **arrays: Any) -> Any:
        planned = plan(descriptor, device="hostcpp:0", implementation="shared")
        return planned.bind(**{n: x.ctypes.data for n, x in arrays.items()})

    hold(name, bind)


def test_more_addresses_than_65535(hostcpp: Plugins) -> None:
    count, rng = 70_000, np.random.default_rng(0)
    a, b, c = (
        rng.integers(-3, 4, (count, *shape)).astype(np.float32)
        for shape in ((3, 4), (4, 5), (3, 5))
    )
    order = rng.permutation(count).astype(np.uint64)
    lists = {
        f"{n}_ptrs": x.ctypes.data + order * np.uint64(x[0].nbytes)
        for n, x in zip("ABC", (a, b, c), strict=True)
    }
    gemm: Any = {"M": 3, "N": 5, "K": 4, "batch": count, "dtype": "float32", **lists}
    call = plan(BatchedGemmPointers(**gemm), device="hostcpp:0", implementation="shared").bind()
    with trace() as launches:
        call()
    assert len(launches) == 1
    np.testing.assert_array_equal(c, a @ b)
