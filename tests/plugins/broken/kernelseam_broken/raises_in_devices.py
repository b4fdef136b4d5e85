"""Registers a backend of the highest priority whose devices cannot be listed."""

from collections.abc import Sequence

from kernelseam.contract import Backend, Device, PluginInfo
from kernelseam.hookspecs import hookimpl
from kernelseam.reference.runtime import HostRuntime
from kernelseam.registry import Registry

from kernelseam_broken.good import info


class NoDevices(HostRuntime):
    """A runtime whose driver fails."""

    def devices(self) -> Sequence[Device]:
        raise RuntimeError("the driver does not answer")

    def describe(self, array: object) -> None:
        return None


@hookimpl
def kernelseam_info() -> PluginInfo:
    return info("raises-in-devices")


@hookimpl
def kernelseam_register(registry: Registry) -> None:
    registry.add_backend(Backend("silent", NoDevices(), priority=1000))
