"""Implements a hook that does not exist."""

from kernelseam.contract import PluginInfo
from kernelseam.hookspecs import hookimpl

from kernelseam_broken.good import info


@hookimpl
def kernelseam_info() -> PluginInfo:
    return info("unknown-hook")


@hookimpl
def kernelseam_teleport() -> None:
    """Nothing calls this."""
