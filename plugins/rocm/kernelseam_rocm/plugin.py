"""The plugin's three hooks. Importing this imports nothing of the vendor's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import metadata
from typing import Any

from kernelseam.contract import CONTRACT_VERSION, EMULATED, Backend, PluginInfo, Runtime
from kernelseam.errors import CompileError, DeviceError
from kernelseam.hookspecs import hookimpl
from kernelseam.registry import Registry

from kernelseam_rocm import emulator, worker
from kernelseam_rocm.blas import HipBlasBatchedGemm, HipBlasGemm
from kernelseam_rocm.gfx950 import KERNELS
from kernelseam_rocm.joined import JoinedRuntime
from kernelseam_rocm.runtime import HipRuntime
from kernelseam_rocm.toolchain import HipToolchain

VARIABLES = (
    (worker.VARIABLE, "a folder that `tools/get-hiprtc.sh DIR` filled: hiprtc is taken from there"),
    (emulator.VARIABLE, f"a checkout of tinygrad, for {emulator.DISTRIBUTION}'s emulated devices"),
)
DISTRIBUTIONS = ("hip-python", "rocm-bindings-core", "rocm-bindings-hip", "rocm-bindings-libraries")


@cache
def backend() -> Backend:
    """The backend "rocm": made at first use, loads nothing."""
    emulated = emulator.find()
    runtime: Runtime = real() if isinstance(emulated, str) else JoinedRuntime(real(), emulated)
    return Backend(
        "rocm",
        runtime,
        HipToolchain(runtime),
        (HipBlasGemm(), HipBlasBatchedGemm()),
        kernels=KERNELS,
        priority=10,
    )


@cache
def real() -> HipRuntime:
    """The runtime of the real devices."""
    return HipRuntime()


@hookimpl
def kernelseam_info() -> PluginInfo:
    version = _version("kernelseam-rocm") or "unknown"
    return PluginInfo(
        "rocm", version, CONTRACT_VERSION, "AMD GPUs through HIP and hiprtc", VARIABLES
    )


@hookimpl
def kernelseam_register(registry: Registry) -> None:
    registry.add_backend(backend())


@hookimpl
def kernelseam_doctor() -> Mapping[str, Any]:
    runtime, toolchain = real(), backend().toolchain
    assert toolchain is not None
    devices = [f"{d} {d.name}, {d.limits.compute_units} compute units" for d in runtime.devices()]
    missing: dict[str, str] = {}
    report: dict[str, Any] = {
        "bindings": {name: version for name in DISTRIBUTIONS if (version := _version(name))},
        "devices": devices,
        "archs": list(toolchain.archs),
    }
    try:
        report["compiler"] = toolchain.compiler()
        can_compile = True
    except CompileError as e:
        report["compiler"], can_compile = f"missing: {e.log}", False
        missing["hiprtc"] = f"ROCm, or `tools/get-hiprtc.sh DIR` and {worker.VARIABLE}=DIR"
    if devices:
        report["mode"] = (
            "compiles and runs" if can_compile else "runs what is in the cache; cannot compile"
        )
    else:
        report["mode"] = "compile only" if can_compile else "neither compiles nor runs"
        report["no device because"] = runtime.absence or "the runtime counts none"
        missing["an AMD GPU"] = report["no device because"]
    report["hipblas"] = _blas(bool(devices))
    if devices and (remedy := report["hipblas"].partition("): ")[2]):
        missing["hipBLAS"] = remedy
    report["emulation"] = _emulation()
    return report | {"missing": missing}


def _emulation() -> str:
    emulated = emulator.find()
    if isinstance(emulated, str):
        return emulated
    devices = ", ".join(str(d) for d in backend().runtime.devices() if d.evidence == EMULATED)
    return f"{devices}, by {emulated.source}"


def _blas(devices: bool) -> str:
    from kernelseam_rocm import bindings

    try:
        module = bindings.module("hipblas").__name__
    except DeviceError as e:
        return str(e)
    return module if devices else f"{module}, not tried without a device"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
