"""Device sources shared by all vendors, with their host halves: one folder an operation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kernelseam.compilation import Binary
from kernelseam.contract import Device, Implementation, KernelFacts, Toolchain
from kernelseam.errors import InvalidValue
from kernelseam.kernels.attention.backward import AttentionBwdHost
from kernelseam.kernels.attention.backward_tile import BackwardTile
from kernelseam.kernels.attention.host import AttentionHost, AttentionTile
from kernelseam.kernels.attention.merge import MERGE
from kernelseam.kernels.attention.unfused import UnfusedAttention
from kernelseam.kernels.covering import Covered, covering, covering_specs
from kernelseam.kernels.gemm.host import GemmHost, GemmTile
from kernelseam.kernels.launches import Launch
from kernelseam.kernels.projection.host import PROJECTIONS
from kernelseam.kernels.shared import Composition, HostHalf, SharedImplementation, build

HALVES: Mapping[str, HostHalf] = {
    "gemm": GemmHost(), "attention": AttentionHost(), "attention_bwd": AttentionBwdHost(), "merge_states": MERGE,
}

WAYS: Mapping[str, Composition] = {**HALVES, **{p.operation: p for p in PROJECTIONS}}
"""By operation, the one that is named "shared"."""


def shared_implementations(toolchain: Toolchain) -> tuple[Implementation, ...]:
    """Every shared kernel on a toolchain, and what is composed of several."""
    return (*(SharedImplementation(way, toolchain) for way in WAYS.values()), UnfusedAttention(toolchain))


def operation_of(spec: Any) -> str:
    """The operation whose spec this is."""
    operation: str = spec.operation
    return operation


def build_binary(
    toolchain: Toolchain, spec: Any, arch: str, tile: Any = None, half: HostHalf | None = None
) -> tuple[Binary, Mapping[str, KernelFacts]]:
    """Compile the kernel of an operation's spec for an arch, no device needed.

    ``tile``: one of ``tiles_of(toolchain, spec, arch)``; by default the first. ``half``: that of another kernel, whose
    spec it then is. Raises InvalidValue where the arch has no tile for the spec, UnknownName for an arch, CompileError.
    """
    half = half or HALVES[operation_of(spec)]
    tiles = half.tiles(spec, toolchain.arch_row(arch))
    if not tiles:
        raise _no_tile(spec, arch)
    tile = tile or tiles[0]
    binary, facts = build(half, spec, tile, toolchain, arch)
    # Where the launch asks for shared memory, the binary does not know of it.
    shared = max(facts.shared_bytes, half.shared_bytes(spec, tile))
    return binary, {half.entry: replace(facts, shared_bytes=shared)}


def launched(toolchain: Toolchain, problem: Any, arch: str) -> tuple[Launch, ...]:
    """The shared kernels of a problem on an arch with its preferred tile, in order; no device needed.

    Raises InvalidValue where the arch has no tile for the spec, UnknownName for an arch.
    """
    half, row = HALVES[operation_of(problem.spec)], toolchain.arch_row(arch)
    tiles = half.tiles(problem.spec, row)
    if not tiles:
        raise _no_tile(problem.spec, arch)
    return half.launches(problem, tiles[0], Device(toolchain.backend, 0, arch)).steps


def _no_tile(spec: Any, arch: str) -> InvalidValue:
    return InvalidValue("spec", spec, f"no tile of {arch} takes it", "Choose another dtype or smaller head dims")


def tiles_of(toolchain: Toolchain, spec: Any, arch: str) -> tuple[Any, ...]:
    """The tile configurations of an arch that take a spec, the preferred first."""
    return HALVES[operation_of(spec)].tiles(spec, toolchain.arch_row(arch))


__all__ = [
    "HALVES", "WAYS", "AttentionTile", "BackwardTile", "Covered", "GemmTile", "SharedImplementation", "build_binary",
    "covering", "covering_specs", "launched", "operation_of", "shared_implementations", "tiles_of",
]
