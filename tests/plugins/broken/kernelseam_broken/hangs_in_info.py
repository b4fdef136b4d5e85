"""Does not come back when it is asked for its facts."""

from kernelseam.contract import PluginInfo
from kernelseam.hookspecs import hookimpl

from kernelseam_broken.good import hang, info


@hookimpl
def kernelseam_info() -> PluginInfo:
    hang()
    return info("hangs-in-info")
