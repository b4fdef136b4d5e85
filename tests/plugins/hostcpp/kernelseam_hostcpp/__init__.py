"""The backend "hostcpp": shared kernels through the system's C++ compiler, run on the host in
threads and fibers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernelseam.contract import CONTRACT_VERSION, Backend, PluginInfo
from kernelseam.errors import CompileError
from kernelseam.hookspecs import hookimpl
from kernelseam.registry import Registry

from kernelseam_hostcpp.runtime import HostArray, HostCppRuntime
from kernelseam_hostcpp.toolchain import HostToolchain

__all__ = ["HostArray", "HostCppRuntime", "HostToolchain"]


@hookimpl
def kernelseam_info() -> PluginInfo:
    return PluginInfo(
        "hostcpp", "0.1.0", CONTRACT_VERSION, "Shared kernels in C++ on the host, for tests"
    )


@hookimpl
def kernelseam_register(registry: Registry) -> None:
    """Of the lowest priority: a default for nobody."""
    registry.add_backend(Backend("hostcpp", HostCppRuntime(), HostToolchain(), priority=-1000))


@hookimpl
def kernelseam_doctor() -> Mapping[str, Any]:
    try:
        return {"compiler": HostToolchain().compiler()}
    except CompileError as e:
        return {"compiler": None, "log": e.log}
