"""The counter on emulated AMD devices: kernels whose counts are known, where KERNELSEAM_TINYGRAD
names the emulator."""

from __future__ import annotations

from typing import Any

import pytest
from kernelseam.errors import CompileError

plugin = pytest.importorskip(
    "kernelseam_rocm.plugin", reason="hiprtc is missing: kernelseam-rocm is not installed"
)
pytest.importorskip("kernelseam_rocm_emulator", reason="kernelseam-rocm-emulator is not installed")
from kernelseam_rocm_emulator import checkout  # noqa: E402
from kernelseam_rocm_emulator.counting import selftest  # noqa: E402
from kernelseam_rocm_emulator.devices import UNITS  # noqa: E402

FOUND = checkout.find()
if not isinstance(FOUND, checkout.Checkout):
    pytest.skip(f"no emulator: {FOUND}", allow_module_level=True)
TOOLCHAIN: Any = plugin.backend().toolchain
try:
    TOOLCHAIN.compiler()
except CompileError as e:
    pytest.skip(f"hiprtc is missing: {e.log}", allow_module_level=True)


@pytest.mark.parametrize("arch", list(UNITS))
def test_conflicts_segments_and_products_are_counted(arch: str) -> None:
    """Strides of 1, 2, 4 and 8 elements of 4 and 16 bytes, in LDS and in memory; a loop of
    products."""
    assert selftest.failures(arch) == []


def test_a_count_that_differs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "STRIDES", (2,))
    strides = selftest._strides
    monkeypatch.setattr(
        selftest, "_strides", lambda *a: ((what, result, 1) for what, result, _ in strides(*a))
    )
    actual = selftest.failures("gfx942")
    assert "gfx942, words at stride 2: LDS read, clocks: 4 counted, 1 expected" in actual
    assert "gfx942, words at stride 2: load, segments: [8, 4] counted, 1 expected" in actual
    assert not any("executions" in failure for failure in actual)
