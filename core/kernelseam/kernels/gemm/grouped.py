"""Kernel definition of gemm.h with groups: which tile, which constants, which arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kernelseam.contract import ArchRow, Device, Launch, Launches
from kernelseam.costs import Work, predicted
from kernelseam.descriptors.gemm.grouped_problem import (
    AXES,
    GroupedGemmProblem,
    GroupedGemmSpec,
)
from kernelseam.kernels.config import Constants
from kernelseam.kernels.definition import KernelDefinition
from kernelseam.kernels.elements import INT32, divide_up, refuse_row_strides
from kernelseam.kernels.gemm.cost import gemm_work
from kernelseam.kernels.gemm.gemm import SCALES, GemmDefinition, refuse_rounding
from kernelseam.kernels.gemm.tile import GemmTile
from kernelseam.kernels.signature import Signature, Structure
from kernelseam.symbolic import least

_GEMM = GemmDefinition()
GROUPS = Structure(
    (("offsets", "pointer"), ("group_count", "i32"), ("capacity", "i32")),
    ("ends", "count", "capacity"),
)


def with_groups(plain: Signature) -> Signature:
    """A GEMM's signature, with the groups before the scales."""
    last = len(plain.parameters) - any(name == "scales" for name, _ in plain.parameters)
    parameters = (*plain.parameters[:last], ("groups", GROUPS), *plain.parameters[last:])
    return replace(plain, parameters=parameters)


class GroupedGemmDefinition(KernelDefinition):
    """One grid over as many tiles as the groups can need, whatever the offsets are."""

    operation = "grouped_gemm"
    entry = _GEMM.entry
    source = _GEMM.source
    multiplies = True

    def refuse(self, problem: GroupedGemmProblem, row: ArchRow) -> str | None:
        p, product = problem, problem.spec.product
        if reason := _GEMM.refuse(p.even, row) or refuse_rounding(product):
            return reason
        if not self.tiles(p.spec, row):
            return f"no tile of {row.arch} for one block takes {product}"
        if all(tile_count(p, t) >= INT32 for t in self.tiles(p.spec, row)):
            return "it has 2^31 tiles of C, or more"
        rows = {f"stride_{n}_row": getattr(p, f"{n}_strides")[1] for n in "abc"}
        rows["stride_a_scales_row"] = p.a_scale_strides[1]
        rows["stride_b_scales_column"] = p.b_scale_strides[1]
        for name, step in zip(SCALES, p.scale_k_strides, strict=True):
            rows[f"stride_{name}_k"] = step
        return refuse_row_strides(**rows)

    def tiles(self, spec: GroupedGemmSpec, row: ArchRow) -> tuple[GemmTile, ...]:
        return tuple(t for t in _GEMM.tiles(spec.product, row) if t.teams == 1)

    def offered(self, problem: GroupedGemmProblem, row: ArchRow) -> tuple[GemmTile, ...]:
        """The tiles that take a problem."""
        return tuple(t for t in self.tiles(problem.spec, row) if tile_count(problem, t) < INT32)

    def takes(
        self, problem: GroupedGemmProblem, tile: GemmTile, row: ArchRow, device: Device
    ) -> bool:
        return tile_count(problem, tile) < INT32

    def tile(self, problem: GroupedGemmProblem, row: ArchRow, device: Device) -> GemmTile:
        """The one with the least predicted time for groups of one size."""
        return min(
            self.offered(problem, row),
            key=lambda t: predicted(gemm_work(problem.even, t, device), row.costs, device.limits),
        )

    def variants(
        self, problem: GroupedGemmProblem, row: ArchRow, device: Device
    ) -> Mapping[str, GemmTile]:
        tiles = (self.tile(problem, row, device), *self.offered(problem, row))
        return {t.name: t for t in tiles}

    def work(self, problem: GroupedGemmProblem, tile: GemmTile, device: Device) -> Work:
        return gemm_work(problem.even, tile, device)

    def launches(self, problem: GroupedGemmProblem, tile: GemmTile, device: Device) -> Launches:
        return Launches((Launch(self, problem, tile),))

    def constants(self, spec: GroupedGemmSpec, tile: GemmTile, row: ArchRow) -> Constants:
        along = 1 + AXES.index(spec.along)
        return {**_GEMM.constants(spec.product, tile, row), "GROUPED": along}

    def signature(self, spec: GroupedGemmSpec) -> Signature:
        return with_groups(_GEMM.signature(spec.product))

    def grid(self, problem: GroupedGemmProblem, tile: GemmTile, device: Device) -> int:
        count = tile_count(problem, tile)
        if not tile.persistent:
            return count
        return least(count, max(device.limits.compute_units, 1) * tile.min_blocks)

    def threads(self, tile: GemmTile, row: ArchRow) -> int:
        return _GEMM.threads(tile, row)

    def shared_bytes(self, spec: GroupedGemmSpec, tile: GemmTile) -> int:
        return tile.shared_bytes(spec.product)

    def values(
        self, problem: GroupedGemmProblem, tile: GemmTile, device: Device
    ) -> dict[str, int | float]:
        p = problem
        heads = [f"{n}_head" for n in ("a", "b", "c", "bias", "residual", "sums")]
        absent = (*heads, "bias_batch", "residual_batch", "residual_row", "sums_batch")
        return {
            **dict.fromkeys(absent, 0),
            **{f"{n}_batch": getattr(p, f"{n}_strides")[0] for n in "abc"},
            **{f"{n}_row": getattr(p, f"{n}_strides")[1] for n in "abc"},
            **dict.fromkeys(("num_heads", "batch_group", "head_group", "b_head_group"), 1),
            "M": p.M,
            "N": p.N,
            "K": p.K if p.reads_inputs else 0,
            "tiles_m": divide_up(p.M, tile.bm),
            "tiles_n": divide_up(p.N, tile.bn),
            "total": tile_count(p, tile),
            "blocks": self.grid(p, tile, device),
            "alpha": p.alpha if p.reads_inputs else 0.0,
            "beta": p.beta,
            **group_values(p),
        }

    def pointers(self, spec: GroupedGemmSpec) -> dict[str, str]:
        return {**_GEMM.pointers(spec.product), "offsets": "offsets"}


def group_values(p: GroupedGemmProblem) -> dict[str, int]:
    """Arguments that tell of the groups, and of their scales."""
    values = {"group_count": p.groups, "capacity": {"m": p.M, "n": p.N, "k": p.K}[p.spec.along]}
    if p.spec.product.scales:
        walks = (p.a_scale_strides, p.b_scale_strides)
        for name, walk, step in zip(SCALES, walks, p.scale_k_strides, strict=True):
            values |= {f"{name}_batch": walk[0], f"{name}_head": 0, f"{name}_row": walk[1]}
            values[f"{name}_k"] = step
    return values


def tile_count(p: GroupedGemmProblem, tile: GemmTile) -> int:
    """Of all groups, whatever the offsets are: see groups.h."""
    rows, columns = divide_up(p.M, tile.bm), divide_up(p.N, tile.bn)
    if p.spec.along == "m":
        rows = p.M // tile.bm + p.groups
    elif p.spec.along == "n":
        columns = p.N // tile.bn + p.groups
    else:
        rows *= p.groups
    return rows * columns if p.groups and p.M and p.N else 0
