"""The ROCm plugin without a GPU: compile-only mode, and every runtime call up to the real library's "no device"."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kernelseam.contract import CONTRACT_VERSION, Device, SourceBundle
from kernelseam.dtypes import DType
from kernelseam.errors import CompileError, NoDevice, UnknownName

pytest.importorskip("kernelseam_rocm", reason="hiprtc is missing: kernelseam-rocm is not installed")
from kernelseam_rocm import archs, bindings, plugin  # noqa: E402

BACKEND = plugin.backend()
RUNTIME: Any = BACKEND.runtime
TOOLCHAIN: Any = BACKEND.toolchain
DEVICE = Device("rocm", 0, "gfx942")


def library() -> None:
    """Skip where the runtime's library is not here, or finds a device."""
    try:
        bindings.call("hipRuntimeGetVersion")
    except NoDevice as e:
        pytest.skip(f"hiprtc is missing: {e}")
    if RUNTIME.devices():
        pytest.skip("an AMD device is here: these tests are about its absence")


def test_importing_the_plugin_imports_no_runtime(python_command: list[str]) -> None:
    code = "import sys, kernelseam_rocm.plugin; print([m for m in sys.modules if m.split('.')[0] in ('hip', 'rocm')])"
    done = subprocess.run([*python_command, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_info_and_doctor() -> None:
    info = plugin.kernelseam_info()
    assert (info.name, info.contract_version) == ("rocm", CONTRACT_VERSION)
    report = plugin.kernelseam_doctor()
    assert report["archs"] == ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"]
    if not report["devices"]:
        assert report["mode"] in ("compile only", "neither compiles nor runs")
        assert report["no device because"]


def binary() -> bytes:
    text = 'extern "C" __global__ void k(int* a) { a[0] = 1; }'
    made: bytes = TOOLCHAIN.compile(SourceBundle("k", "k.h", (("k.h", text),), (), ("-O3",)), "gfx942")
    return made


CALLS: dict[str, Callable[[], object]] = {
    "empty": lambda: RUNTIME.empty((4,), DType.float32, DEVICE),
    "from_host": lambda: RUNTIME.from_host(np.ones(3, np.float32), DEVICE),
    "synchronize": lambda: RUNTIME.synchronize(DEVICE),
    "activate": lambda: RUNTIME.activate(DEVICE).__enter__(),
    "time": lambda: RUNTIME.time(lambda stream: None, DEVICE, 1),
    "load": lambda: TOOLCHAIN.load(binary(), "k", DEVICE),
    "hipInit": lambda: bindings.call("hipInit", 0),
    "hipSetDevice": lambda: bindings.call("hipSetDevice", 0),
    "hipMalloc": lambda: bindings.call("hipMalloc", 16),
    "hipModuleLoadData": lambda: bindings.call("hipModuleLoadData", binary()),
    "hipDeviceSynchronize": lambda: bindings.call("hipDeviceSynchronize"),
    "hipEventCreate": lambda: bindings.call("hipEventCreate"),
    "hipStreamCreate": lambda: bindings.call("hipStreamCreate"),
    "hipStreamSynchronize": lambda: bindings.call("hipStreamSynchronize", 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_call_reaches_the_library_and_says_that_there_is_no_device(name: str) -> None:
    library()
    said = r"hip\w+ failed with hipErrorNoDevice \(100\): no ROCm-capable device is detected"
    with pytest.raises(NoDevice, match=said):
        CALLS[name]()


def test_without_a_device_nothing_is_found_and_nothing_fails() -> None:
    library()
    assert list(RUNTIME.devices()) == []
    assert "hipErrorNoDevice (100)" in RUNTIME.absence
    assert RUNTIME.describe(np.ones(3)) is None
    assert RUNTIME.current_stream(DEVICE) == 0


def test_the_compiler_is_named_by_the_libraries_that_do_the_work() -> None:
    try:
        name = TOOLCHAIN.compiler()
    except CompileError as e:
        pytest.skip(f"hiprtc is missing: {e.log}")
    assert name.startswith("hiprtc ")
    assert "amd_comgr" in name


def test_archs_are_refused_by_name() -> None:
    with pytest.raises(UnknownName, match="arch = gfx900: must be one of gfx90a, gfx942, gfx950, gfx1100, gfx1201"):
        archs.row("gfx900")


@pytest.mark.parametrize("arch", list(archs.ROWS))
def test_rows_of_the_table(arch: str) -> None:
    row = archs.row(arch)
    assert row.warp_size == (64 if arch.startswith("gfx9") else 32)
    assert row.shared_bytes_per_block >= 60 * 1024
    flushes = dict(row.defines).get("KS_FLUSHES_SUBNORMALS")
    assert flushes == ("1" if arch == "gfx90a" else None)
    assert archs.RATES[arch][DType.float16] > archs.RATES[arch][DType.float64]
