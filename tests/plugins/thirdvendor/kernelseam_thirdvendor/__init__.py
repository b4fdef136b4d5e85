"""The vendor Acme: two devices of host memory and one implementation of the batched GEMM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernelseam.contract import CONTRACT_VERSION, Backend, PluginInfo
from kernelseam.hookspecs import hookimpl
from kernelseam.registry import Registry

from kernelseam_thirdvendor.gemm import AcmeGemm
from kernelseam_thirdvendor.runtime import AcmeArray, AcmeRuntime

__all__ = ["AcmeArray", "AcmeGemm", "AcmeRuntime"]


@hookimpl
def kernelseam_info() -> PluginInfo:
    return PluginInfo("thirdvendor", "0.1.0", CONTRACT_VERSION, "Acme devices")


@hookimpl
def kernelseam_register(registry: Registry) -> None:
    registry.add_backend(
        Backend("acme", AcmeRuntime(), implementations=(AcmeGemm(),), priority=-200)
    )


@hookimpl
def kernelseam_doctor() -> Mapping[str, Any]:
    return {"devices": [str(d) for d in AcmeRuntime().devices()]}
