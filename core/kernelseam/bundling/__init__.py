"""From a trace's file to an installable wheel of binaries, for machines without a compiler."""

from kernelseam.bundling.collecting import Collected, LeftOut, collect
from kernelseam.bundling.traces import read_trace
from kernelseam.bundling.wheel import WheelName, write_wheel

__all__ = [
    "Collected",
    "LeftOut",
    "WheelName",
    "collect",
    "read_trace",
    "write_wheel",
]
