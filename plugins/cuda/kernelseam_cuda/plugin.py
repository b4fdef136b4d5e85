"""The plugin's three hooks. Importing this imports nothing of the vendor's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from kernelseam.contract import CONTRACT_VERSION, Backend, PluginInfo
from kernelseam.errors import CompileError
from kernelseam.hookspecs import hookimpl
from kernelseam.registry import Registry

from kernelseam_cuda import bindings, blas, cublaslt
from kernelseam_cuda.blas_lt import CublasLtGemm
from kernelseam_cuda.runtime import CudaRuntime
from kernelseam_cuda.sm90 import KERNELS
from kernelseam_cuda.toolchain import CudaToolchain

DISTRIBUTIONS = (
    "cupy-cuda13x",
    "cupy-cuda12x",
    "cuda-bindings",
    "cuda-pathfinder",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cublas",
    "nvidia-cublas-cu12",
)


@cache
def backend() -> Backend:
    """The backend "cuda": made at first use, loads nothing."""
    runtime = CudaRuntime()
    libraries = blas.CublasGemm(), CublasLtGemm(runtime), blas.CublasBatchedGemm()
    return Backend(
        "cuda",
        runtime,
        CudaToolchain(runtime),
        libraries,
        kernels=KERNELS,
        priority=10,
        jax_platform="cuda",
    )


@hookimpl
def kernelseam_info() -> PluginInfo:
    version = bindings.version("kernelseam-cuda") or "unknown"
    return PluginInfo("cuda", version, CONTRACT_VERSION, "NVIDIA GPUs through CUDA and nvrtc")


@hookimpl
def kernelseam_register(registry: Registry) -> None:
    registry.add_backend(backend())


@hookimpl
def kernelseam_doctor() -> Mapping[str, Any]:
    runtime, toolchain = backend().runtime, backend().toolchain
    assert isinstance(runtime, CudaRuntime) and toolchain is not None
    devices = [
        f"{d} {d.name}, {d.limits.compute_units} multiprocessors, "
        f"{d.limits.memory_bytes / 2**30:.0f} GiB"
        for d in runtime.devices()
    ]
    missing: dict[str, str] = {}
    report: dict[str, Any] = {
        "packages": {n: version for n in DISTRIBUTIONS if (version := bindings.version(n))}
        or f"none: {bindings.INSTALL}",
        "devices": devices,
        "archs": list(toolchain.archs),
    }
    try:
        report["compiler"] = toolchain.compiler()
        can_compile = True
    except CompileError as e:
        report["compiler"], can_compile = f"missing: {e.log}", False
        missing["nvrtc"] = bindings.INSTALL
    report["cublas"] = blas.unavailable() or "found"
    report["cublaslt"] = cublaslt.unavailable() or "found"
    if not any(name.startswith("cupy-") for name in report["packages"]):
        report["no device memory because"] = f"cupy is missing: {bindings.INSTALL}"
        missing["cupy"] = bindings.INSTALL
    if devices:
        report["driver"] = f"CUDA {_cuda_version(bindings.call('cuDriverGetVersion'))}"
        report["mode"] = (
            "compiles and runs" if can_compile else "runs what is in the cache; cannot compile"
        )
    else:
        report["mode"] = "compile only" if can_compile else "neither compiles nor runs"
        report["no device because"] = runtime.absence or "the driver counts none"
        missing["an NVIDIA GPU"] = report["no device because"]
    if devices and report["cublas"] != "found":
        missing["cuBLAS"] = blas.INSTALL
    return report | {"missing": missing}


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
