"""On an NVIDIA GPU: lengths in device memory beyond the keys and below 0, which nobody looked
at."""

from __future__ import annotations

from typing import Any

import pytest
from nvidia_gpu import cupy
from told_lengths import Array, hold

pytestmark = pytest.mark.gpu


def into(array: Any, values: Array) -> None:
    array[...] = cupy.asarray(values)


def test_lengths_beyond_the_keys_are_cut_and_negative_ones_are_0() -> None:
    hold(cupy.asarray, cupy.asnumpy, into)
