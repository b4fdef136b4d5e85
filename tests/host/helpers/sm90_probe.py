"""Hopper's device sources that are plain C++, run on the host."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from kernelseam.contract import LaunchConfig, SourceBundle
from kernelseam.kernels.config import CONFIG, ElementType, config_header
from kernelseam.kernels.expression import (
    EPILOGUE,
    EXPRESSION,
    epilogue_header,
    expression_header,
)
from kernelseam.kernels.sources import shared_sources
from kernelseam_cuda import toolchain as toolchain_module
from kernelseam_hostcpp import HostToolchain
from kernelseam_hostcpp.toolchain import kernel_of

Change = Callable[[SourceBundle], SourceBundle]
WARP = LaunchConfig((1, 1, 1), (16, 1, 1), 0)
"""One, of the host's 16 lanes."""
_WARP_FUNCTIONS = """
KS_DEVICE int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
KS_DEVICE int of_lane(int x, int from) {
  int found = lane() == from ? x : -2147483647;
  for (int d = 1; d < WARP; d *= 2) found = max_of(found, shuffle_xor(found, d));
  return found;
}
KS_DEVICE int __shfl_sync(unsigned, int x, int from) { return of_lane(x, from); }
KS_DEVICE int __shfl_up_sync(unsigned, int x, int by) {
  int found = x;
  for (int from = 0; from < WARP; from++) {
    const int y = of_lane(x, from);
    if (lane() - by == from) found = y;
  }
  return found;
}
KS_DEVICE unsigned __ballot_sync(unsigned, int x) {
  unsigned found = x ? 1u << lane() : 0;
  for (int d = 1; d < WARP; d *= 2) found |= (unsigned)shuffle_xor((int)found, d);
  return found;
}
"""
"""CUDA's, by the host's exchange of lanes."""

TILES_CONSTANTS: dict[str, int | str] = {
    "CAUSAL": 0,
    "WINDOW": 0,
    "PREFIX": 0,
    "MASK": 0,
    "ALIBI": 0,
    "SOFTCAP": 0,
    "BIAS": "void",
    "SINKS": 0,
    "LENGTHS": 0,
    "GROUPED": 0,
    "Q_VIEW": 0,
    "KV_VIEW": 0,
    "OUT_VIEW": 0,
    "GROUP_HEADS": 1,
    "IN_PARTS": 0,
    "IN_CLUSTER": 0,
}
"""Of tiles.h."""


@dataclass(frozen=True)
class Launch:
    """Of an attention: what is asked of TileScheduler, and how keys are hidden."""

    batch: int
    heads: int
    S_q: int
    S_k: int
    head_group: int = 1
    causal: bool = False
    window: tuple[int, int] | None = None
    section: int = 1
    q: tuple[int, ...] = ()
    """Lengths of packed sequences, of queries and of keys."""
    k: tuple[int, ...] = ()

    def lengths(self, entry: int) -> tuple[int, int]:
        return (self.q[entry], self.k[entry]) if self.q else (self.S_q, self.S_k)

    def sees(self, entry: int, i: int, j: int) -> bool:
        S_q, S_k = self.lengths(entry)
        d = j - i - (S_k - S_q)
        if self.window is not None:
            return -self.window[0] <= d <= self.window[1]
        return not self.causal or d <= 0


def as_it_is(made: SourceBundle) -> SourceBundle:
    return made


def run(
    text: str,
    constants: Mapping[str, int | str],
    change: Change,
    *arrays: npt.NDArray[np.generic],
    config: LaunchConfig = WARP,
) -> None:
    """The kernel ``probe`` of a text over arrays, in place, with the device sources changed."""
    toolchain = HostToolchain()
    shared = ("tile/", "attention/", "gemm/")
    files = {n: t for n, t in shared_sources().items() if n.startswith(shared)}
    files |= {n: t for n, t in toolchain_module.sources().items() if n.startswith("sm90/")}
    files.update(toolchain.platform_files("host"))
    files["platform.h"] = files.pop("platform_host.h")
    files[EXPRESSION], files[EPILOGUE] = expression_header(None), epilogue_header(None)
    given = {"CAPTURES": 0, **constants}
    members = {n: ElementType(v) if isinstance(v, str) else v for n, v in given.items()}
    files[CONFIG] = config_header(members, dict.fromkeys(members, "of a test"))
    files["probe.h"] = f'#include "tile/tile.h"\n{_WARP_FUNCTIONS}{text}'
    defines = (("KS_THROUGH_REGISTERS", "0"),)
    options = toolchain.arch_row("host").options
    made = SourceBundle("probe", "probe.h", tuple(sorted(files.items())), defines, options)
    arguments = struct.pack(f"{len(arrays)}Q", *(x.ctypes.data for x in arrays))
    kernel_of(change(made)).prepare(config, arguments)(0)
