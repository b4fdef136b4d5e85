"""Works, but cannot report on itself."""

from collections.abc import Mapping
from typing import Any

from kernelseam.contract import PluginInfo
from kernelseam.hookspecs import hookimpl

from kernelseam_broken.good import info


@hookimpl
def kernelseam_info() -> PluginInfo:
    return info("raises-in-doctor")


@hookimpl
def kernelseam_doctor() -> Mapping[str, Any]:
    raise SystemExit("the doctor is out")
