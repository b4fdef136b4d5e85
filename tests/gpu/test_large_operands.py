"""On an NVIDIA GPU: operands of more than 2³¹ elements, over memory whose zeros a wrapped offset
would read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from far_operands import FAR, REACH, hold
from kernelseam import BatchedGemmStrided, plan
from kernelseam.contract import OperandRule
from nvidia_gpu import DEVICE, cupy

pytestmark = pytest.mark.gpu
if DEVICE.limits.memory_bytes < 2**34:
    pytest.skip("the GPU has less than 16 GiB", allow_module_level=True)


@contextmanager
def memory(rule: OperandRule) -> Iterator[Any]:
    assert rule.dtype is not None
    size = rule.dtype.itemsize
    start = REACH if rule.span * size > 2**31 else 0
    flat = cupy.zeros(start // size + rule.span, rule.dtype.numpy)
    yield cupy.lib.stride_tricks.as_strided(
        flat[start // size :], rule.shape, [s * size for s in rule.strides]
    )
    del flat
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.parametrize("name", FAR)
def test_one_operand_spans_more_than_2_31_elements(name: str) -> None:
    def bind(descriptor: BatchedGemmStrided, **arrays: Any) -> Any:
        planned = plan(descriptor, device=DEVICE, implementation="shared")
        return planned.bind(**{n: x.data.ptr for n, x in arrays.items()})

    hold(name, bind, memory, cupy.asnumpy, cupy.asarray)
