"""The first NVIDIA GPU, and CuPy. A test module that imports this is skipped where one of them is
missing."""

from __future__ import annotations

import os
from typing import Any

import pytest
from kernelseam.contract import Device
from kernelseam.plugins import plugins

pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
_backend = plugins().registry.backends.get("cuda")
if _backend is None or not _backend.runtime.devices():
    pytest.skip("gpu is missing: no NVIDIA device here", allow_module_level=True)
RUNTIME: Any = _backend.runtime
TOOLCHAIN: Any = _backend.toolchain
DEVICE: Device = RUNTIME.devices()[0]
cupy: Any = pytest.importorskip("cupy")

#: For tests that fill the device's memory or count what is left of it: not beside other processes.
ALONE = pytest.mark.skipif(
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1,
    reason="it needs the device's memory to itself: run this module without -n",
)
