"""Registers a backend of the highest priority whose driver does not answer: neither about devices
nor about arrays."""

from collections.abc import Sequence

from kernelseam.contract import ArrayInfo, Backend, Device, PluginInfo
from kernelseam.hookspecs import hookimpl
from kernelseam.reference.runtime import HostRuntime
from kernelseam.registry import Registry

from kernelseam_broken.good import hang, info


class Deaf(HostRuntime):
    """A runtime that waits for its driver."""

    def devices(self) -> Sequence[Device]:
        hang()
        return ()

    def describe(self, array: object) -> ArrayInfo | None:
        self.devices()
        return None


@hookimpl
def kernelseam_info() -> PluginInfo:
    return info("hangs-in-devices")


@hookimpl
def kernelseam_register(registry: Registry) -> None:
    registry.add_backend(Backend("deaf", Deaf(), priority=1000))
