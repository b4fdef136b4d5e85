"""Adds an implementation that loses the last summand of every product."""

from typing import Any

from calibration.tile_model import TileModel
from kernelseam.contract import Cost, Device, PluginInfo
from kernelseam.hookspecs import hookimpl
from kernelseam.registry import Registry

from kernelseam_broken.good import info


class Careless(TileModel):
    """It promises to be the fastest."""

    @property
    def name(self) -> str:
        return "wrong-numbers"

    def cost(self, problem: Any, device: Device) -> Cost:
        return Cost(0, 0, 0.0)


@hookimpl
def kernelseam_info() -> PluginInfo:
    return info("wrong-numbers")


@hookimpl
def kernelseam_register(registry: Registry) -> None:
    registry.add_implementation(Careless("gemm", "dropped-last-k"))
