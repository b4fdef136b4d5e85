"""torch with a device that a plugin here knows. Where there is none, a module that imports this is
skipped."""

from __future__ import annotations

import kernelseam
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("gpu is missing: torch sees no device here", allow_module_level=True)
if {d.backend for d in kernelseam.devices()} <= {"numpy"}:
    pytest.skip("gpu is missing: no plugin here knows torch's device", allow_module_level=True)
