"""The first NVIDIA GPU, and CuPy. A test module that imports this is skipped where one of them is
missing."""

from __future__ import annotations

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
