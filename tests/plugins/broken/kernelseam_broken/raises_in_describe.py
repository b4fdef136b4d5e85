"""Registers a backend of the highest priority that cannot be asked about an array."""

from collections.abc import Sequence

from kernelseam.contract import ArrayInfo, Backend, Device, PluginInfo
from kernelseam.hookspecs import hookimpl
from kernelseam.reference.runtime import HostRuntime
from kernelseam.registry import Registry

from kernelseam_broken.good import info


class Puzzled(HostRuntime):
    """A runtime without devices that fails on every array."""

    def devices(self) -> Sequence[Device]:
        return ()

    def describe(self, array: object) -> ArrayInfo | None:
        raise RuntimeError("what is an array?")


@hookimpl
def kernelseam_info() -> PluginInfo:
    return info("raises-in-describe")


@hookimpl
def kernelseam_register(registry: Registry) -> None:
    registry.add_backend(Backend("puzzled", Puzzled(), priority=1000))
