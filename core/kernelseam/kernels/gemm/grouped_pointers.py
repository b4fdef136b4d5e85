"""Kernel definition of gemm.h for a list of products of sizes of their own."""

from __future__ import annotations

from kernelseam.contract import ArchRow, Device
from kernelseam.descriptors.gemm.grouped_pointers_problem import (
    TABLE,
    GroupedGemmPointersProblem,
    GroupedGemmPointersSpec,
)
from kernelseam.kernels.config import Constants
from kernelseam.kernels.elements import divide_up
from kernelseam.kernels.gemm.gemm import GemmDefinition
from kernelseam.kernels.gemm.grouped import OverGroups, with_groups, with_registers_left
from kernelseam.kernels.gemm.tile import GemmTile
from kernelseam.kernels.signature import Signature

_GEMM = GemmDefinition()
_BY_LIST = 4
"""What groups.h calls BY_LIST."""


class GroupedGemmPointersDefinition(OverGroups):
    """One grid over the tiles of all groups, whose sizes the host knows."""

    operation = "grouped_gemm_pointers"

    def count(self, problem: GroupedGemmPointersProblem, tile: GemmTile) -> int:
        return problem.tiles(tile.bm, tile.bn)

    def tiles(self, spec: GroupedGemmPointersSpec, row: ArchRow) -> tuple[GemmTile, ...]:
        return with_registers_left(super().tiles(spec, row), row)

    def row_strides(self, problem: GroupedGemmPointersProblem) -> dict[str, int]:
        names = ("stride_a_row", "stride_b_row", "stride_c_row")
        columns = zip(*problem.row_strides, strict=True)  # none without groups
        return {n: max(rows) for n, rows in zip(names, columns, strict=False)}

    def constants(self, spec: GroupedGemmPointersSpec, tile: GemmTile, row: ArchRow) -> Constants:
        return {**_GEMM.constants(spec.product, tile, row), "GROUPED": _BY_LIST}

    def signature(self, spec: GroupedGemmPointersSpec) -> Signature:
        return with_groups(_GEMM.signature(spec.product))

    def values(
        self, problem: GroupedGemmPointersProblem, tile: GemmTile, device: Device
    ) -> dict[str, int | float]:
        p = problem
        m, n, k = p.most
        return {
            **_GEMM.values(p.even, tile, device),
            "M": m,
            "N": n,
            "K": k if p.reads_inputs else 0,
            "tiles_m": divide_up(m, tile.bm),
            "tiles_n": divide_up(n, tile.bn),
            "total": self.count(p, tile),
            "blocks": self.grid(p, tile, device),
            "alpha": p.alpha if p.reads_inputs else 0.0,
            "group_count": p.groups,
            "capacity": 0,
        }

    def pointers(self, spec: GroupedGemmPointersSpec) -> dict[str, str]:
        return {**_GEMM.pointers(spec.product), "offsets": TABLE}
