"""Kernel definitions of cuda_kernels/sm90/gemm/gemm.h for lists of products, and of list_maps.h,
which makes their tensor maps before it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from kernelseam.contract import ArchRow, Device, Launch, Launches, TensorMap
from kernelseam.costs import Work
from kernelseam.descriptors.gemm.grouped_pointers_problem import (
    TABLE,
    GroupedGemmPointersProblem,
    GroupedGemmPointersSpec,
)
from kernelseam.kernels.config import Constants
from kernelseam.kernels.elements import divide_up, refuse_row_strides
from kernelseam.kernels.gemm.grouped import GROUPS, with_groups
from kernelseam.kernels.signature import Signature
from kernelseam.symbolic import most

from kernelseam_cuda.sm90.gemm import HopperGemm
from kernelseam_cuda.sm90.gemm_cost import work as work_of
from kernelseam_cuda.sm90.gemm_maps import MAPS, list_tensor_maps
from kernelseam_cuda.sm90.gemm_tiling import (
    MAX_EXTENT,
    MAX_TILES,
    order_values,
    refuse_extents,
    slice_of,
)
from kernelseam_cuda.sm90.grouped import MAX_GROUPS, TABLE_BYTES, HopperGroups
from kernelseam_cuda.sm90.kernel import HopperKernel
from kernelseam_cuda.sm90.tiles import GROUPED, GROUPED_PING_PONG, REGISTERS, HopperGemmTile

_GEMM = HopperGemm()
_BY_LIST = 4
"""What groups.h calls BY_LIST."""
_MAP_BYTES, _OF_GROUP = 128, 3
_WARPS = 4
"""That make maps in a block, of a group each."""
_SECONDS = 3e-6
"""That they take."""


class HopperListMaps(HopperKernel):
    """The tensor maps of each group's A, B and C, in the workspace."""

    operation = "grouped_gemm_pointers"
    name = "sm90"
    entry = "gemm_list_maps_sm90"
    source = "sm90/gemm/list_maps.h"
    early = True

    def refuse(self, problem: Any, row: ArchRow) -> str | None:
        return None  # what it is launched for looks

    def tiles(self, spec: Any, row: ArchRow) -> tuple[HopperGemmTile, ...]:
        return GROUPED[:1]

    def tile(self, problem: Any, row: ArchRow, device: Device) -> HopperGemmTile:
        return GROUPED[0]

    def constants(
        self, spec: GroupedGemmPointersSpec, tile: HopperGemmTile, row: ArchRow
    ) -> Constants:
        own = ("T", "TC", "A_TRANSPOSED", "B_TRANSPOSED", "GATHERED", "SCATTERED")
        constants = _GEMM.constants(spec.product, tile, row)
        return {**{n: constants[n] for n in own}, "GROUPED": _BY_LIST}

    def signature(self, spec: GroupedGemmPointersSpec) -> Signature:
        return Signature(
            (
                *((m, "tensor_map") for m in MAPS[:_OF_GROUP]),
                *((p, "pointer") for p in ("a", "b", "c", "maps")),
                ("groups", GROUPS),
            ),
            generated=True,
            in_place=True,
        )

    def grid(self, problem: Any, tile: HopperGemmTile, device: Device) -> int:
        return divide_up(problem.groups, _WARPS)

    def threads(self, tile: HopperGemmTile, row: ArchRow) -> int:
        return row.warp_size * _WARPS

    def shared_bytes(self, spec: Any, tile: HopperGemmTile) -> int:
        return 0

    def values(
        self, problem: GroupedGemmPointersProblem, tile: HopperGemmTile, device: Device
    ) -> dict[str, int | float]:
        return {"group_count": problem.groups, "capacity": 0}

    def pointers(self, spec: GroupedGemmPointersSpec) -> dict[str, str]:
        lists = {"a": "A_ptrs", "b": "B_ptrs", "c": "C_ptrs"}
        return {**lists, "maps": "", "offsets": TABLE}

    def tensor_maps(
        self, problem: GroupedGemmPointersProblem, tile: HopperGemmTile, device: Device
    ) -> dict[str, TensorMap]:
        maps = list_tensor_maps(problem.spec.product, tile)
        return {n: maps[n] for n in MAPS[:_OF_GROUP]}

    def work(self, problem: Any, tile: HopperGemmTile, device: Device) -> Work:
        blocks = self.grid(problem, tile, device)
        return Work(problem.groups * _OF_GROUP * _MAP_BYTES, blocks, block_seconds=_SECONDS)


LIST_MAPS = HopperListMaps()


class HopperListedGemm(HopperGroups):
    """Products of 16 bits of sizes of their own."""

    operation = "grouped_gemm_pointers"

    def refuse(self, problem: GroupedGemmPointersProblem, row: ArchRow) -> str | None:
        p, product = problem, problem.spec.product
        if product.dtype.itemsize != 2:
            return f"it takes lists of bfloat16 and float16, not of {product.dtype}"
        if p.groups > MAX_GROUPS:
            return f"{p.groups} groups: it takes {MAX_GROUPS}"
        if not p.reads_inputs:
            return "there is nothing to multiply"
        if reason := _GEMM.refuse(replace(p.even, M=max(p.even.M, 1), K=max(p.even.K, 1)), row):
            return reason
        m, n, k = p.most
        if reason := refuse_extents(replace(p.even, M=m, N=n, K=k)):
            return reason
        if not self.offered(p):
            return f"it needs {MAX_TILES} tiles or more"
        a, b, c = (max(rows) for rows in zip(*p.row_strides, strict=True))
        return refuse_row_strides(stride_a_row=a, stride_b_row=b, stride_c_row=c)

    def tiles(self, spec: GroupedGemmPointersSpec, row: ArchRow) -> tuple[HopperGemmTile, ...]:
        product = spec.product
        turns = product.dtype_c.itemsize == 2 and not product.a_transposed
        return GROUPED + ((GROUPED_PING_PONG,) if turns else ())

    def offered(
        self, problem: GroupedGemmPointersProblem, row: Any = None
    ) -> tuple[HopperGemmTile, ...]:
        return tuple(t for t in self.tiles(problem.spec, row) if self.stores(problem, t))

    def count(self, p: GroupedGemmPointersProblem, tile: HopperGemmTile) -> int:
        return p.tiles(tile.bm * tile.cluster, tile.bn)

    def whole(self, p: GroupedGemmPointersProblem) -> bool:
        return bool((p.table[:, 1] * p.spec.product.dtype_c.itemsize % 16 == 0).all())

    def takes(
        self,
        problem: GroupedGemmPointersProblem,
        tile: HopperGemmTile,
        row: ArchRow,
        device: Device,
    ) -> bool:
        few = problem.groups <= MAX_GROUPS and max(problem.most[:2]) < MAX_EXTENT
        return few and self.stores(problem, tile)

    def launches(
        self, problem: GroupedGemmPointersProblem, tile: HopperGemmTile, device: Device
    ) -> Launches:
        own = Launch(LIST_MAPS, problem, tile, dict.fromkeys((*MAPS[:_OF_GROUP], "maps"), 0))
        product = Launch(self, problem, tile, dict.fromkeys((*MAPS, "origin"), 0))
        return Launches((own, product), most(problem.groups, 1) * _OF_GROUP * _MAP_BYTES)

    def constants(
        self, spec: GroupedGemmPointersSpec, tile: HopperGemmTile, row: ArchRow
    ) -> Constants:
        producer, consumer = REGISTERS[tile.groups]
        return {
            **_GEMM.constants(spec.product, tile, row),
            "POINTERS": False,
            "GROUPED": _BY_LIST,
            "PRODUCER_REGISTERS": producer,
            "CONSUMER_REGISTERS": consumer,
            "SHARED_BYTES": self.shared_bytes(spec, tile),
        }

    def signature(self, spec: GroupedGemmPointersSpec) -> Signature:
        return with_groups(_GEMM.signature(spec.product))

    def shared_bytes(self, spec: GroupedGemmPointersSpec, tile: HopperGemmTile) -> int:
        return tile.shared_bytes(False, table=TABLE_BYTES)

    def values(
        self, problem: GroupedGemmPointersProblem, tile: HopperGemmTile, device: Device
    ) -> dict[str, int | float]:
        p, (m, n, k) = problem, problem.most
        return {
            **_GEMM.values(replace(p.even, batch=1), tile, device),
            **order_values(replace(p.even, batch=1), tile),
            **dict.fromkeys(("a_head_step", "a_batch_step", "b_head_step", "b_batch_step"), 0),
            "M": m,
            "N": n,
            "slices": divide_up(k, slice_of(p.spec.product)),
            "group_count": p.groups,
            "capacity": 0,
            "alpha": p.alpha,
            "beta": p.beta,
        }

    def pointers(self, spec: GroupedGemmPointersSpec) -> dict[str, str]:
        return {**_GEMM.pointers(spec.product), "offsets": TABLE}

    def tensor_maps(
        self, problem: GroupedGemmPointersProblem, tile: HopperGemmTile, device: Device
    ) -> dict[str, TensorMap]:
        return list_tensor_maps(problem.spec.product, tile)

    def work(
        self, problem: GroupedGemmPointersProblem, tile: HopperGemmTile, device: Device
    ) -> Work:
        """Of the tiles that there are, as long as their groups sum; the rest as of groups of one
        size."""
        p, even = problem, replace(problem.even, whole_lines=True)  # as allocators place matrices
        work, size = work_of(even, tile, device), slice_of(p.spec.product)
        slice_operations = work.operations / divide_up(even.K, size)
        counts, slices = tile_counts(p, tile), -(-p.table[:, 2] // size)
        total = max(int(counts.sum()), 1)
        return work._replace(
            bytes=work.bytes + p.bytes_moved - even.bytes_moved,
            blocks=total * tile.cluster,
            operations=slice_operations * int((counts * slices).sum()) / total,
            longest=slice_operations * int(slices[counts > 0].max(initial=0)),
        )


def tile_counts(p: GroupedGemmPointersProblem, tile: HopperGemmTile) -> npt.NDArray[np.int64]:
    """Tiles of each product, those of a cluster counted as one."""
    m, n = p.table[:, 0], p.table[:, 1]
    return -(-m // (tile.bm * tile.cluster)) * -(-n // tile.bn)
