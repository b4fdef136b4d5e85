"""On an NVIDIA GPU: attentions, gradients, merges and pages of which one operand spans more than
2³¹ elements, over memory whose zeros a wrapped offset would read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kernelseam.samples.data.memory import Placement
from large_offsets import CASES, verdict_of
from nvidia_gpu import ALONE, DEVICE, cupy

pytestmark = [pytest.mark.gpu, ALONE]


class Memory:
    """One operand's block on the device, zeros."""

    def __init__(self, before: int, size: int) -> None:
        self._flat = cupy.zeros(before + size, np.uint8)
        self._before = before
        self.address = int(self._flat.data.ptr) + before

    def _views(self, placement: Placement) -> Iterator[tuple[Any, Any]]:
        """(index into the logical array, view of the device's bytes) of what has elements."""
        size = placement.dtype.itemsize
        for index, first, shape in placement._parts():
            start = self._before + (placement.offset + first) * size
            strides = (*(s * size for s in placement.strides[-len(shape) :]), 1)
            yield (
                index,
                cupy.lib.stride_tricks.as_strided(self._flat[start:], (*shape, size), strides),
            )

    def write(self, placement: Placement, value: npt.NDArray[Any]) -> None:
        for index, view in self._views(placement):
            part = np.ascontiguousarray(value[index])
            view[...] = cupy.asarray(part.view(np.uint8).reshape(view.shape))

    def read(self, placement: Placement) -> npt.NDArray[Any]:
        result = np.zeros(placement.shape, placement.dtype.numpy)
        for index, view in self._views(placement):
            result[index] = cupy.asnumpy(view).view(placement.dtype.numpy).reshape(view.shape[:-1])
        return result


@contextmanager
def memory(before: int, size: int) -> Iterator[Memory]:
    if before + size > DEVICE.limits.memory_bytes * 3 // 4:
        pytest.skip(f"{(before + size) >> 30} GiB are more than the GPU has free")
    yield Memory(before, size)
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.parametrize("name", CASES)
def test_one_operand_spans_more_than_2_31_elements(name: str) -> None:
    operand, case = CASES[name]
    cupy.get_default_memory_pool().free_all_blocks()
    verdict = verdict_of(case, operand, DEVICE, "shared", memory)
    assert verdict.passed, verdict.message
