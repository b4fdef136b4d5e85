"""Speaks another version of the contract."""

from kernelseam.contract import PluginInfo
from kernelseam.hookspecs import hookimpl

from kernelseam_broken.good import info


@hookimpl
def kernelseam_info() -> PluginInfo:
    return info("other-contract", 99)
