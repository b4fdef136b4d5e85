"""On an NVIDIA GPU: lengths in device memory beyond the keys and below 0, which nobody looked at."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kernelseam.plugins import plugins

pytestmark = pytest.mark.gpu
pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
BACKEND = plugins().registry.backends.get("cuda")
if BACKEND is None or not BACKEND.runtime.devices():
    pytest.skip("gpu is missing: no NVIDIA device here", allow_module_level=True)
cupy = pytest.importorskip("cupy")

sys.path.append(str(Path(__file__).parents[1] / "unit" / "helpers"))

from told_lengths import Array, hold  # noqa: E402


def into(array: Any, values: Array) -> None:
    array[...] = cupy.asarray(values)


def test_lengths_beyond_the_keys_are_cut_and_negative_ones_are_0() -> None:
    hold(cupy.asarray, cupy.asnumpy, into)
