"""Registers a backend under the reference's name."""

from kernelseam.contract import Backend, PluginInfo
from kernelseam.hookspecs import hookimpl
from kernelseam.reference.runtime import HostRuntime
from kernelseam.registry import Registry

from kernelseam_broken.good import info


@hookimpl
def kernelseam_info() -> PluginInfo:
    return info("takes-a-taken-name")


@hookimpl
def kernelseam_register(registry: Registry) -> None:
    registry.add_backend(Backend("numpy", HostRuntime()))
