"""Works, but does not come back from its report."""

from collections.abc import Mapping
from typing import Any

from kernelseam.contract import PluginInfo
from kernelseam.hookspecs import hookimpl

from kernelseam_broken.good import hang, info


@hookimpl
def kernelseam_info() -> PluginInfo:
    return info("hangs-in-doctor")


@hookimpl
def kernelseam_doctor() -> Mapping[str, Any]:
    hang()
    return {}
