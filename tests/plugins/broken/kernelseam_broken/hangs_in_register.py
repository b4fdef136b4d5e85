"""Registers a backend and does not come back: nothing of it may stay."""

from kernelseam.contract import Backend, PluginInfo
from kernelseam.hookspecs import hookimpl
from kernelseam.reference.runtime import HostRuntime
from kernelseam.registry import Registry

from kernelseam_broken.good import hang, info


@hookimpl
def kernelseam_info() -> PluginInfo:
    return info("hangs-in-register")


@hookimpl
def kernelseam_register(registry: Registry) -> None:
    registry.add_backend(Backend("half", HostRuntime()))
    hang()
