"""Adds an implementation that loses the last summand of every product."""

from kernelseam.contract import PluginInfo
from kernelseam.hookspecs import hookimpl
from kernelseam.registry import Registry
from wrong_problem import WrongProblem

from kernelseam_broken.good import info


class Careless(WrongProblem):
    """It promises to be the fastest."""

    name = "wrong-numbers"


@hookimpl
def kernelseam_info() -> PluginInfo:
    return info("wrong-numbers")


@hookimpl
def kernelseam_register(registry: Registry) -> None:
    registry.add_implementation(Careless("gemm", "dropped-last-k", 0.0))
