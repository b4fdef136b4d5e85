"""Device sources shared by all vendors, with their definitions: one folder an operation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from kernelseam.compilation import Binary
from kernelseam.contract import Composition, Device, Implementation, KernelFacts, Launch, Toolchain
from kernelseam.errors import InvalidValue
from kernelseam.kernels.attention.backward import AttentionBwdDefinition
from kernelseam.kernels.attention.backward_tile import BackwardTile
from kernelseam.kernels.attention.decode import DECODE, DecodeTile
from kernelseam.kernels.attention.forward import AttentionDefinition
from kernelseam.kernels.attention.merge import MERGE
from kernelseam.kernels.attention.prefix_groups import PREFIX_GROUPS
from kernelseam.kernels.attention.tile import AttentionTile
from kernelseam.kernels.attention.unfused import UnfusedAttention
from kernelseam.kernels.cache.cache import CACHE
from kernelseam.kernels.definition import KernelDefinition
from kernelseam.kernels.gemm.gemm import GemmDefinition
from kernelseam.kernels.gemm.gemv import GEMV, GemvTile
from kernelseam.kernels.gemm.grouped import GroupedGemmDefinition
from kernelseam.kernels.gemm.grouped_pointers import GroupedGemmPointersDefinition
from kernelseam.kernels.gemm.tile import GemmTile
from kernelseam.kernels.kernel import KernelImplementation, build
from kernelseam.kernels.projection.projection import PROJECTIONS

KERNELS: Mapping[str, KernelDefinition] = {
    "gemm": GemmDefinition(),
    "grouped_gemm": GroupedGemmDefinition(),
    "grouped_gemm_pointers": GroupedGemmPointersDefinition(),
    "attention": AttentionDefinition(),
    "attention_bwd": AttentionBwdDefinition(),
    "merge_states": MERGE,
    "paged_cache": CACHE,
}

COMPOSITIONS: Mapping[str, Composition] = {**KERNELS, **{p.operation: p for p in PROJECTIONS}}
"""Operation → the composition that is named "shared"."""


def shared_implementations(toolchain: Toolchain) -> tuple[Implementation, ...]:
    """Implementations of every shared kernel and composition on a toolchain."""
    return (
        *(KernelImplementation(c, toolchain) for c in COMPOSITIONS.values()),
        KernelImplementation(DECODE, toolchain),
        KernelImplementation(GEMV, toolchain),
        KernelImplementation(PREFIX_GROUPS, toolchain),
        UnfusedAttention(toolchain),
    )


def operation_of(spec: Any) -> str:
    operation: str = spec.operation
    return operation


def build_binary(
    toolchain: Toolchain,
    spec: Any,
    arch: str,
    tile: Any = None,
    kernel: KernelDefinition | None = None,
) -> tuple[Binary, Mapping[str, KernelFacts]]:
    """Compile the kernel of an operation's spec for an arch, no device needed.

    ``tile``: one of ``tiles_of(toolchain, spec, arch)``; by default the first. ``kernel``: another
    one than the shared, whose spec it then is. Raises InvalidValue where the arch has no tile for
    the spec, UnknownName for an arch, CompileError.
    """
    kernel = kernel or KERNELS[operation_of(spec)]
    tiles = kernel.tiles(spec, toolchain.arch_row(arch))
    if not tiles:
        raise _no_tile(spec, arch)
    tile = tile or tiles[0]
    binary, facts = build(kernel, spec, tile, toolchain, arch)
    # Dynamic shared memory is part of the launch, not of the binary's facts.
    shared = max(facts.shared_bytes, kernel.shared_bytes(spec, tile))
    return binary, {kernel.entry: replace(facts, shared_bytes=shared)}


def launches_of(
    toolchain: Toolchain, problem: Any, arch: str, kernel: Composition | None = None
) -> tuple[Launch, ...]:
    """The kernels of a problem on an arch in order, of a kernel definition with its preferred tile;
    no device needed.

    ``kernel``: a plugin's own; by default the shared one. Raises InvalidValue where the arch has no
    tile for the spec, UnknownName for an arch.
    """
    composition = kernel or KERNELS[problem.operation]
    row = toolchain.arch_row(arch)
    device = Device(toolchain.backend, 0, arch)
    if not isinstance(composition, KernelDefinition):
        return composition.launches(problem, composition.tile(problem, row, device), device).kernels
    tiles = composition.tiles(problem.spec, row)
    if not tiles:
        raise _no_tile(problem.spec, arch, composition.refuse(problem, row))
    return composition.launches(problem, tiles[0], device).kernels


def launches_by_implementation(
    toolchain: Toolchain, problem: Any, arch: str, kernels: Iterable[Composition] = ()
) -> tuple[tuple[str, tuple[Launch, ...]], ...]:
    """(implementation, ``launches_of``) for the shared kernel and for those of a plugin's own that
    take the problem. Raises as ``launches_of`` does where none takes it."""
    row, launches = toolchain.arch_row(arch), list[tuple[str, tuple[Launch, ...]]]()
    for k in kernels:
        if (
            k.operation == problem.operation
            and arch in (k.archs or toolchain.archs)
            and not k.refuse(problem, row)
        ):
            launches.append((k.name, launches_of(toolchain, problem, arch, k)))
    try:
        shared = ("shared", launches_of(toolchain, problem, arch))
    except InvalidValue:
        if not launches:
            raise
        return tuple(launches)
    return (shared, *launches)


def _no_tile(spec: Any, arch: str, reason: str | None = None) -> InvalidValue:
    rule = reason or f"no tile of {arch} takes it"
    return InvalidValue("spec", spec, rule, "Choose another dtype or smaller head dims")


def tiles_of(toolchain: Toolchain, spec: Any, arch: str) -> tuple[Any, ...]:
    """The tile configurations of an arch that take a spec, the preferred first."""
    return KERNELS[operation_of(spec)].tiles(spec, toolchain.arch_row(arch))


__all__ = [
    "KERNELS",
    "COMPOSITIONS",
    "AttentionTile",
    "BackwardTile",
    "DECODE",
    "DecodeTile",
    "Composition",
    "GEMV",
    "GemmTile",
    "GemvTile",
    "KernelDefinition",
    "KernelImplementation",
    "build_binary",
    "launches_of",
    "operation_of",
    "shared_implementations",
    "tiles_of",
    "launches_by_implementation",
]
