"""The ROCm plugin where there is no GPU: hooks, doctor, and every runtime call up to the library's
refusal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernelseam.contract import CONTRACT_VERSION, Device, Runtime, SourceBundle
from kernelseam.descriptors.gemm.problem import GemmSpec
from kernelseam.dtypes import FLOATING, DType
from kernelseam.errors import DeviceError, NoDevice, UnknownName
from kernelseam.kernels import KERNELS, tiles_of
from kernelseam.kernels.kernel import bundle

pytest.importorskip("kernelseam_rocm", reason="kernelseam-rocm is not installed")
from kernelseam_rocm import archs, bindings, plugin  # noqa: E402
from kernelseam_rocm.runtime import HipRuntime  # noqa: E402

DEVICE = Device("rocm", 0, "gfx942")
ARCHS = ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1200", "gfx1201"]


NO_DRIVER = "no AMD GPU driver is here: neither /dev/kfd nor /dev/dxg exists"
needs_no_driver = pytest.mark.skipif(
    any(os.path.exists(p) for p in bindings.DRIVERS), reason="a GPU's driver is here"
)


def library_missing() -> str:
    """Why the real HIP runtime cannot be loaded here; "" where it can."""
    output = python("""if True:
        from kernelseam_rocm import bindings
        bindings.DRIVERS = ("/dev/null",)
        try: bindings.call("hipRuntimeGetVersion")
        except Exception as e: print(e)
    """)
    return (
        f"hiprtc is missing, and the HIP runtime with it: {output}"
        if "cannot be called" in output
        else ""
    )


def python(code: str, **environment: str) -> str:
    env = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    under = [os.environ["KERNELSEAM_HIP_RUN"]] if "KERNELSEAM_HIP_RUN" in os.environ else []
    done = subprocess.run(
        [*under, sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_hooks_import_nothing_of_the_vendors() -> None:
    code = (
        "import sys; from kernelseam_rocm import plugin; from kernelseam.registry import Registry; "
        "plugin.kernelseam_info(); registry = Registry(); plugin.kernelseam_register(registry); "
        "print(sorted(registry.backends), [m for m in sys.modules if m.split('.')[0] in ('hip', "
        "'rocm', 'torch', 'cupy', 'elftools')])"  # noqa: E501
    )
    assert python(code) == "['rocm'] []"


def test_info() -> None:
    info = plugin.kernelseam_info()
    assert (info.name, info.contract_version) == ("rocm", CONTRACT_VERSION)


def test_it_fills_the_contract() -> None:
    backend = plugin.backend()
    assert isinstance(backend.runtime, Runtime)
    assert backend.toolchain is not None and list(backend.toolchain.archs) == ARCHS
    assert [i.name for i in backend.implementations] == ["hipblas", "hipblas-batched"]


def test_doctor_survives_missing_libraries(tmp_path: Path) -> None:
    code = (
        "import json; from kernelseam_rocm import plugin; "
        "print(json.dumps(plugin.kernelseam_doctor()))"
    )
    report = json.loads(python(code, ROCM_PATH=str(tmp_path), LD_LIBRARY_PATH=""))
    if report["devices"]:
        pytest.skip("a GPU is here")
    assert report["archs"] == ARCHS
    if "missing" in report["compiler"]:  # a system-wide installation may still be found
        assert report["mode"] == "neither compiles nor runs"
        assert "failed to dlopen" in report["compiler"]
    assert (
        "hipGetDeviceCount" in report["no device because"]
        or report["no device because"] == NO_DRIVER
    )


def test_doctor_survives_missing_bindings() -> None:
    code = (
        "import json, sys; sys.modules['hip'] = sys.modules['rocm'] = None; "
        "from kernelseam_rocm import plugin; print(json.dumps(plugin.kernelseam_doctor()))"
    )
    report = json.loads(python(code))
    assert report["mode"] == "neither compiles nor runs"
    for key in ("compiler", "no device because", "hipblas"):
        package = "kernelseam-rocm[blas]" if key == "hipblas" else "hip-python"
        assert "cannot be imported" in report[key] and f"install {package}" in report[key]


@needs_no_driver
def test_doctor_says_that_it_can_only_compile() -> None:
    if reason := library_missing():
        pytest.skip(reason)
    report = plugin.kernelseam_doctor()
    assert report["mode"] == "compile only"
    assert report["compiler"].startswith("hiprtc ")
    assert report["no device because"] == NO_DRIVER


def array() -> Any:
    return np.zeros(4, np.float32)


RUNTIME = HipRuntime()
METHODS: dict[str, Callable[[], object]] = {
    "empty": lambda: RUNTIME.empty((4,), DType.float32, DEVICE),
    "from_host": lambda: RUNTIME.from_host(array(), DEVICE),
    "synchronize": lambda: RUNTIME.synchronize(DEVICE),
    "activate": lambda: RUNTIME.activate(DEVICE).__enter__(),
    "time": lambda: RUNTIME.time(lambda stream: None, DEVICE, 1),
}


@needs_no_driver
def test_real_calls_are_refused_for_want_of_a_device() -> None:
    """The library's own refusals, in a process that has nothing else in it."""
    if reason := library_missing():
        pytest.skip(reason)
    output = python("""if True:
        from kernelseam.errors import NoDevice
        from kernelseam_rocm import bindings
        bindings.DRIVERS = ("/dev/null",)
        copy = bindings.hip().hipMemcpyKind.hipMemcpyHostToDevice
        for name, *arguments in (
            ("hipGetDeviceCount",), ("hipMalloc", 16), ("hipSetDevice", 0), ("hipMemcpy", 0, 0, 0, copy),
            ("hipDeviceSynchronize",), ("hipEventCreate",), ("hipModuleLoadData", b"not a code object"),
        ):
            try: bindings.call(name, *arguments)
            except NoDevice as e: print(str(e).removeprefix(name + " "))
        try: bindings.properties(0)
        except NoDevice as e: print(str(e).removeprefix("hipGetDeviceProperties").removeprefix("R0600").strip())
    """)  # noqa: E501
    assert (
        output.splitlines()
        == ["failed with hipErrorNoDevice (100): no ROCm-capable device is detected"] * 8
    )


@needs_no_driver
def test_without_a_driver_the_library_is_left_alone() -> None:
    """HIP 6.4 crashes at exit where it was asked from two threads and found no device: nothing here
    asks it."""
    code = """if True:
        import os, threading
        from kernelseam_rocm.runtime import HipRuntime
        asked = threading.Thread(target=lambda: HipRuntime().devices())
        asked.start(); asked.join()
        runtime = HipRuntime()
        print(runtime.devices(), runtime.absence, "libamdhip64" in open("/proc/self/maps").read())
    """
    assert python(code) == f"() {NO_DRIVER} False"


@pytest.mark.parametrize("name", METHODS)
def test_the_runtime_raises_no_device(name: str) -> None:
    if RUNTIME.devices():
        pytest.skip("a GPU is here")
    with pytest.raises(NoDevice):
        METHODS[name]()


def test_without_a_device_nothing_is_described() -> None:
    if RUNTIME.devices():
        pytest.skip("a GPU is here")
    assert RUNTIME.absence
    assert RUNTIME.describe(array()) is None
    assert RUNTIME.current_stream(DEVICE) == 0


@needs_no_driver
def test_loading_needs_a_device() -> None:
    if reason := library_missing():
        pytest.skip(reason)
    chain = plugin.backend().toolchain
    assert chain is not None
    bundle = SourceBundle(
        "k", "k.h", (("k.h", 'extern "C" __global__ void k(int* a) { a[0] = 1; }\n'),), ()
    )
    binary = chain.compile(bundle, "gfx942")
    assert chain.inspect(binary, "gfx942")["k"].parameters == ((0, 8),)
    with pytest.raises(NoDevice, match="no AMD GPU driver is here"):
        chain.load(binary, "k", DEVICE)


def test_statuses_become_errors_that_say_what_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    class Status(int):
        name = "hipErrorInvalidValue"

    class Hip:
        @staticmethod
        def hipGetErrorString(status: int) -> tuple[int, bytes]:
            return 0, b"invalid argument"

        @staticmethod
        def hipMemcpy() -> tuple[Status]:
            return (Status(1),)

        @staticmethod
        def hipMalloc() -> tuple[Status]:
            return (Status(2),)

        @staticmethod
        def hipFree() -> tuple[Status]:
            raise RuntimeError("failed to dlsym 'hipFree'")

    monkeypatch.setattr(bindings, "hip", Hip)
    with pytest.raises(DeviceError) as caught:
        bindings.call("hipMemcpy")
    assert str(caught.value) == "hipMemcpy failed with hipErrorInvalidValue (1): invalid argument"
    with pytest.raises(MemoryError, match="hipMalloc failed"):
        bindings.call("hipMalloc")
    with pytest.raises(NoDevice, match="hipFree cannot be called: failed to dlsym 'hipFree'"):
        bindings.call("hipFree")


@pytest.mark.parametrize("arch", ARCHS)
def test_rows_of_the_table(arch: str) -> None:
    row = archs.row(arch)
    assert row.warp_size == (64 if arch.startswith("gfx9") else 32)
    assert row.matrix_dtypes == {DType.float16, DType.bfloat16} | row.fp8_dtypes
    assert set(archs.RATES[arch]) == {*FLOATING, *row.fp8_dtypes}
    chain = plugin.backend().toolchain
    assert chain is not None
    header = dict(row.defines)["KS_MATRIX_HEADER"].strip('"')
    spec = GemmSpec(DType.float16, DType.float16, DType.float32)
    files = dict(bundle(KERNELS["gemm"], spec, tiles_of(chain, spec, arch)[0], chain, arch).files)
    own = ("gemm", "groups", "heads", "head_places", "scales", "epilogue", "reductions", "joined")
    gemm = {f"gemm/{n}.h" for n in own}
    gemm |= {f"generated/{n}.h" for n in ("config", "gemm", "epilogue")}
    shared = gemm | {"tile/base.h", "tile/simt.h", "tile/tile.h"}
    assert set(files) - shared == {"platform.h", "copy.h", "engine.h", "xf32.h", header}
    assert all("#include <" not in text for text in chain.platform_files(arch).values())


def test_an_unknown_arch_is_refused() -> None:
    with pytest.raises(UnknownName, match=f"arch = sm_90a: must be one of {', '.join(ARCHS)}"):
        archs.row("sm_90a")


def test_a_compiler_that_cannot_be_loaded_is_a_compile_error(tmp_path: Path) -> None:
    code = (
        "from kernelseam_rocm import plugin; from kernelseam.errors import CompileError\n"
        "try: print(plugin.backend().toolchain.compiler())\n"
        "except CompileError as e: print(type(e).__name__, e.kernel, e.log)"
    )
    output = python(code, ROCM_PATH=str(tmp_path), LD_LIBRARY_PATH="")
    assert output.startswith(
        ("CompileError hiprtc hiprtc cannot be used: failed to dlopen", "hiprtc ")
    )
