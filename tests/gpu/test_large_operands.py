"""On an NVIDIA GPU: operands of more than 2³¹ elements, over memory whose zeros a wrapped offset would read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kernelseam import BatchedGemmStrided, plan
from kernelseam.contract import OperandRule
from kernelseam.plugins import plugins

pytestmark = pytest.mark.gpu
pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
BACKEND = plugins().registry.backends.get("cuda")
if BACKEND is None or not BACKEND.runtime.devices():
    pytest.skip("gpu is missing: no NVIDIA device here", allow_module_level=True)
DEVICE = BACKEND.runtime.devices()[0]
if DEVICE.limits.memory_bytes < 2**34:
    pytest.skip("the GPU has less than 16 GiB", allow_module_level=True)
cupy = pytest.importorskip("cupy")

sys.path.append(str(Path(__file__).parents[1] / "unit" / "helpers"))

from far_operands import FAR, REACH, hold  # noqa: E402


@contextmanager
def memory(rule: OperandRule) -> Iterator[Any]:
    assert rule.dtype is not None
    size = rule.dtype.itemsize
    start = REACH if rule.span * size > 2**31 else 0
    flat = cupy.zeros(start // size + rule.span, rule.dtype.numpy)
    yield cupy.lib.stride_tricks.as_strided(flat[start // size :], rule.shape, [s * size for s in rule.strides])
    del flat
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.parametrize("name", FAR)
def test_one_operand_spans_more_than_2_31_elements(name: str) -> None:
    def bind(descriptor: BatchedGemmStrided, **arrays: Any) -> Any:
        made = plan(descriptor, device=DEVICE, implementation="shared")
        return made.bind(**{n: x.data.ptr for n, x in arrays.items()})

    hold(name, bind, memory, cupy.asnumpy, cupy.asarray)
