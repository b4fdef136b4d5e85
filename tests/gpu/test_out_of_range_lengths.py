"""On an NVIDIA GPU: key lengths in device memory that are out of range are clamped."""

from __future__ import annotations

from typing import Any

import pytest
from nvidia_gpu import cupy
from out_of_range_lengths import Array, check_clamped

pytestmark = pytest.mark.gpu


def into(array: Any, values: Array) -> None:
    array[...] = cupy.asarray(values)


def test_lengths_beyond_the_keys_are_cut_and_negative_ones_are_0() -> None:
    check_clamped(cupy.asarray, cupy.asnumpy, into)
