"""Kernel definition of gemm.h with groups: which tile, which constants, which arguments."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from kernelseam.contract import ArchRow, Device
from kernelseam.costs import Work
from kernelseam.descriptors.gemm.grouped_problem import (
    AXES,
    INDICES,
    GroupedGemmProblem,
    GroupedGemmSpec,
)
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec
from kernelseam.kernels.config import Constants
from kernelseam.kernels.definition import OfferingDefinition
from kernelseam.kernels.elements import INT32, divide_up, refuse_row_strides
from kernelseam.kernels.gemm.cost import gemm_work
from kernelseam.kernels.gemm.epilogue import grouped_epilogue_values
from kernelseam.kernels.gemm.gemm import SCALES, GemmDefinition, refuse_rounding
from kernelseam.kernels.gemm.tile import GemmTile
from kernelseam.kernels.signature import Signature, Structure
from kernelseam.symbolic import least

_GEMM = GemmDefinition()
GROUPS = Structure(
    (("offsets", "pointer"), ("group_count", "i32"), ("capacity", "i32")),
    ("ends", "count", "capacity"),
)


_MOST_SUMS = 64
"""Of a thread, beside which registers are left for indices of rows, or for a group's sizes; those
that more blocks on a compute unit would take are needed, too."""
_ROW_INDICES = Structure(
    (*((n, "pointer") for n in INDICES), ("a_rows", "i32"), ("c_rows", "i32")),
    ("a", "c", "factors", "a_rows", "c_rows"),
)


def with_groups(plain: Signature, indices: bool = False, **more: Structure | str) -> Signature:
    """A GEMM's signature, with the groups, indices of rows, and ``more``, where the body's optional
    parameters have them."""
    given = {**dict(plain.parameters), **more, "groups": GROUPS}
    if indices:
        given["indices"] = _ROW_INDICES
    fixed = [x for x in plain.parameters if x[0] not in plain.optional]
    optional = [(n, given[n]) for n in plain.optional if n in given]
    return replace(plain, parameters=(*fixed, *optional))


def group_constants(spec: GroupedGemmSpec) -> Constants:
    """Those of groups.h."""
    kinds = dict(zip(("GATHERED", "SCATTERED", "FACTORS"), INDICES, strict=True))
    return {
        "GROUPED": 1 + AXES.index(spec.along),
        **{constant: name in spec.indices for constant, name in kinds.items()},
    }


def group_pointers(spec: GroupedGemmSpec) -> dict[str, str]:
    """Operands of the groups, by parameter; of indices that are not there none."""
    indices = {n: n if n in spec.indices else "" for n in INDICES if spec.indices}
    return {"offsets": "offsets", **indices}


def with_registers_left(tiles: Iterable[GemmTile], row: ArchRow) -> tuple[GemmTile, ...]:
    """Tiles that hold more than sums without a spill."""
    return tuple(
        replace(t, min_blocks=max(t.min_blocks - 1, 1))
        for t in tiles
        if t.bm * t.bn <= _MOST_SUMS * row.warp_size * t.warps_m * t.warps_n
    )


class OverGroups(OfferingDefinition):
    """gemm.h over groups, whose tiles are those of the GEMM for one block."""

    entry = _GEMM.entry
    source = _GEMM.source
    multiplies = True

    @abstractmethod
    def count(self, problem: Any, tile: GemmTile) -> int:
        """Tiles of all groups, as many as there may be."""

    @abstractmethod
    def row_strides(self, problem: Any) -> dict[str, int]:
        """Strides of rows by name, the largest."""

    def product(self, spec: Any) -> GemmSpec:
        """That of each group, with the accesses that this kernel makes."""
        product: GemmSpec = spec.product
        return product

    def even(self, problem: Any) -> GemmProblem:
        """Products of one size, by which a tile is chosen."""
        even: GemmProblem = problem.even
        return replace(even, spec=self.product(problem.spec))

    def refuse(self, problem: Any, row: ArchRow) -> str | None:
        product = self.product(problem.spec)
        if reason := _GEMM.refuse(self.even(problem), row) or refuse_rounding(product):
            return reason
        if not self.tiles(problem.spec, row):
            return f"no tile of {row.arch} for one block takes {product}"
        if all(self.count(problem, t) >= INT32 for t in self.tiles(problem.spec, row)):
            return "it has 2^31 tiles of C, or more"
        return refuse_row_strides(**self.row_strides(problem))

    def tiles(self, spec: Any, row: ArchRow) -> tuple[GemmTile, ...]:
        return tuple(t for t in _GEMM.tiles(self.product(spec), row) if t.teams == 1)

    def offered(self, problem: Any, row: ArchRow) -> tuple[GemmTile, ...]:
        """The tiles that take a problem."""
        return tuple(t for t in self.tiles(problem.spec, row) if self.count(problem, t) < INT32)

    def takes(self, problem: Any, tile: GemmTile, row: ArchRow, device: Device) -> bool:
        return self.count(problem, tile) < INT32

    def work(self, problem: Any, tile: GemmTile, device: Device) -> Work:
        """As for groups of one size."""
        return gemm_work(self.even(problem), tile, device)

    def grid(self, problem: Any, tile: GemmTile, device: Device) -> int:
        count = self.count(problem, tile)
        if not tile.persistent:
            return count
        return least(count, max(device.limits.compute_units, 1) * tile.min_blocks)

    def threads(self, tile: GemmTile, row: ArchRow) -> int:
        return _GEMM.threads(tile, row)

    def shared_bytes(self, spec: Any, tile: GemmTile) -> int:
        return tile.shared_bytes(self.product(spec))


class GroupedGemmDefinition(OverGroups):
    """One grid over as many tiles as the groups can need, whatever the offsets are."""

    operation = "grouped_gemm"

    def product(self, spec: GroupedGemmSpec) -> GemmSpec:
        return spec.by_elements

    def count(self, problem: GroupedGemmProblem, tile: GemmTile) -> int:
        """See groups.h."""
        p = problem
        rows, columns = divide_up(p.M, tile.bm), divide_up(p.N, tile.bn)
        if p.spec.along == "m":
            rows = p.M // tile.bm + p.groups
        elif p.spec.along == "n":
            columns = p.N // tile.bn + p.groups
        else:
            rows *= p.groups
        return rows * columns if p.groups and p.M and p.N else 0

    def row_strides(self, problem: GroupedGemmProblem) -> dict[str, int]:
        p = problem
        rows = {f"stride_{n}_row": getattr(p, f"{n}_strides")[1] for n in "abc"}
        rows["stride_a_scales_row"] = p.a_scale_strides[1]
        rows["stride_b_scales_column"] = p.b_scale_strides[1]
        for name, step in zip(SCALES, p.scale_k_strides, strict=True):
            rows[f"stride_{name}_k"] = step
        return rows

    def tiles(self, spec: GroupedGemmSpec, row: ArchRow) -> tuple[GemmTile, ...]:
        tiles = super().tiles(spec, row)
        return with_registers_left(tiles, row) if spec.indices else tiles

    def constants(self, spec: GroupedGemmSpec, tile: GemmTile, row: ArchRow) -> Constants:
        return {**_GEMM.constants(spec.by_elements, tile, row), **group_constants(spec)}

    def signature(self, spec: GroupedGemmSpec) -> Signature:
        return with_groups(_GEMM.signature(spec.product), bool(spec.indices))

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
            "total": self.count(p, tile),
            "blocks": self.grid(p, tile, device),
            "alpha": p.alpha if p.reads_inputs else 0.0,
            "beta": p.beta,
            **group_values(p),
        }

    def pointers(self, spec: GroupedGemmSpec) -> dict[str, str]:
        return {**_GEMM.pointers(spec.product), **group_pointers(spec)}


def group_values(p: GroupedGemmProblem) -> dict[str, int | float]:
    """Arguments that tell of the groups, of their scales, and of their epilogue."""
    values: dict[str, int | float] = {
        "group_count": p.groups,
        "capacity": {"m": p.M, "n": p.N, "k": p.K}[p.spec.along],
    }
    if p.spec.indices:
        values |= {"a_rows": p.a_rows, "c_rows": p.c_rows}
    if p.spec.product.scales:
        walks = (p.a_scale_strides, p.b_scale_strides)
        for name, walk, step in zip(SCALES, walks, p.scale_k_strides, strict=True):
            values |= {f"{name}_batch": walk[0], f"{name}_head": 0, f"{name}_row": walk[1]}
            values[f"{name}_k"] = step
    if p.spec.product.epilogue is not None:
        values |= grouped_epilogue_values(p)
    return values
