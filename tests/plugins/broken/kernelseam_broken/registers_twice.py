"""Registers two implementations under one name."""

from kernelseam.contract import PluginInfo
from kernelseam.hookspecs import hookimpl
from kernelseam.reference.gemm import NumpyGemm
from kernelseam.registry import Registry

from kernelseam_broken.good import info


class Twin(NumpyGemm):
    """A GEMM of another name."""

    name = "twin"


@hookimpl
def kernelseam_info() -> PluginInfo:
    return info("registers-twice")


@hookimpl
def kernelseam_register(registry: Registry) -> None:
    registry.add_implementation(Twin())
    registry.add_implementation(Twin())
