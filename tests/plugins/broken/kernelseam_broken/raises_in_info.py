"""Raises when it is asked for its facts."""

from kernelseam.contract import PluginInfo
from kernelseam.hookspecs import hookimpl


@hookimpl
def kernelseam_info() -> PluginInfo:
    raise RuntimeError("no facts today")
