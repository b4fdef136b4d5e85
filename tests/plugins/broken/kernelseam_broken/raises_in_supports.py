"""Adds an implementation that cannot say whether it takes a problem."""

from typing import Any

from kernelseam.contract import Cost, Device, PluginInfo
from kernelseam.hookspecs import hookimpl
from kernelseam.reference.gemm import NumpyGemm
from kernelseam.registry import Registry

from kernelseam_broken.good import info


class Undecided(NumpyGemm):
    """It promises to be the fastest."""

    name = "raises-in-supports"

    def cost(self, problem: Any, device: Device) -> Cost:
        return Cost(0, 0, 0.0)

    def supports(self, problem: Any, device: Device) -> str | None:
        raise RuntimeError("it depends")


@hookimpl
def kernelseam_info() -> PluginInfo:
    return info("raises-in-supports")


@hookimpl
def kernelseam_register(registry: Registry) -> None:
    registry.add_implementation(Undecided())
