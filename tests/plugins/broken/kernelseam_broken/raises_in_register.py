"""Registers a backend, then raises: nothing of it may stay."""

from kernelseam.contract import Backend, PluginInfo
from kernelseam.hookspecs import hookimpl
from kernelseam.reference.runtime import HostRuntime
from kernelseam.registry import Registry

from kernelseam_broken.good import info


@hookimpl
def kernelseam_info() -> PluginInfo:
    return info("raises-in-register")


@hookimpl
def kernelseam_register(registry: Registry) -> None:
    registry.add_backend(Backend("half", HostRuntime()))
    raise RuntimeError("the second half is missing")
