"""Adds an implementation that takes every problem and builds none."""

from typing import Any

from kernelseam.contract import Cost, Device, PlanParts, PluginInfo
from kernelseam.hookspecs import hookimpl
from kernelseam.reference.gemm import NumpyGemm
from kernelseam.registry import Registry

from kernelseam_broken.good import info


class Unfinished(NumpyGemm):
    """It promises to be the fastest."""

    name = "raises-in-build"

    def cost(self, problem: Any, device: Device) -> Cost:
        return Cost(0, 0, 0.0)

    def build(self, problem: Any, device: Device) -> PlanParts:
        raise RuntimeError("the second wing is missing")


@hookimpl
def kernelseam_info() -> PluginInfo:
    return info("raises-in-build")


@hookimpl
def kernelseam_register(registry: Registry) -> None:
    registry.add_implementation(Unfinished())
