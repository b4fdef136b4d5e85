"""Implements a hook with an argument that it does not have."""

from kernelseam.contract import PluginInfo
from kernelseam.hookspecs import hookimpl

from kernelseam_broken.good import info


@hookimpl
def kernelseam_info() -> PluginInfo:
    return info("wrong-arguments")


@hookimpl
def kernelseam_register(registry: object, moon: str) -> None:
    """Nothing gives the moon."""
