"""Kernel definition of cuda_kernels/sm90/gemm/tf32.h: float32 products by way of TF32."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kernelseam.contract import ArchRow, Device, Launch, Launches, TensorMap
from kernelseam.costs import Work
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec
from kernelseam.dtypes import DType
from kernelseam.kernels.config import Constants, members
from kernelseam.kernels.definition import OfferingDefinition
from kernelseam.kernels.elements import (
    DEVICE_TYPE,
    TF32_PRODUCTS,
    divide_up,
    divider_parameter,
    refuse_row_strides,
    row_strides,
)
from kernelseam.kernels.signature import Signature
from kernelseam.symbolic import least

from kernelseam_cuda.sm90.gemm_maps import ORIGIN_BYTES, steps, tensor_map
from kernelseam_cuda.sm90.gemm_tiling import (
    MAX_TILES,
    ORDER,
    order_values,
    refuse_extents,
    tile_count,
)
from kernelseam_cuda.sm90.kernel import HopperKernel
from kernelseam_cuda.sm90.tf32_tiles import TF32, TF32_REGISTERS, HopperTf32Tile

SLICE = 32
"""Elements of K in a stage of the ring."""
_PANEL = 32
"""Rows of the left factor in a box, where it lies along them."""

_MAPS = ("left_map", "right_map")
_POINTERS = ("a", "b", "c", "bias", "residual", "origin")
_STRIDES = ("c_batch", "c_head", "bias_batch", "bias_head", "residual_batch", "residual_head")
_INTS = (
    "c_row",
    "residual_row",
    "M",
    "N",
    "slices",
    "a_head_step",
    "a_batch_step",
    "b_head_step",
    "b_batch_step",
)


def swaps(spec: GemmSpec) -> bool:
    """Whether the kernel multiplies op(B)ᵀ by op(A)ᵀ."""
    return not spec.b_transposed


class HopperTf32Gemm(HopperKernel, OfferingDefinition):
    """float32 products by one or three products of TF32; persistent blocks."""

    operation = "gemm"
    name = "sm90-tf32"
    entry = "gemm_sm90_tf32"
    source = "sm90/gemm/tf32.h"
    multiplies = True

    def refuse(self, problem: GemmProblem, row: ArchRow) -> str | None:
        p, spec = problem, problem.spec
        if spec.precision is None:
            return "it multiplies float32 with a precision of tf32 or tf32x3"
        for option in spec.extras:
            if option not in ("bias", "residual"):
                return f"{option} is not supported by this kernel"
        if spec.dtype_c is not DType.float32:
            return f"its result is of float32, not {spec.dtype_c}"
        if spec.residual not in (None, DType.float32):
            return f"its residual is of float32, not {spec.residual}"
        if spec.a_transposed and not spec.b_transposed:
            return "neither A nor B lies along K, as one factor must for its instructions"
        for name, vector in (("A", spec.vector_a), ("B", spec.vector_b)):
            if vector < 16:
                return f"rows of {name} at multiples of {vector} bytes: TMA takes multiples of 16"
        if reason := refuse_extents(p):
            return reason
        if not self.offered(p, row):
            return f"it needs {MAX_TILES} tiles or more"
        return refuse_row_strides(**row_strides(p, "a", "b", "c", "residual"))

    def tiles(self, spec: GemmSpec, row: ArchRow) -> tuple[HopperTf32Tile, ...]:
        return tuple(replace(t, swap_ab=swaps(spec)) for t in TF32 if t.precision == spec.precision)

    def takes(
        self, problem: GemmProblem, tile: HopperTf32Tile, row: ArchRow, device: Device
    ) -> bool:
        return tile_count(problem, tile) < MAX_TILES

    def offered(self, problem: GemmProblem, row: ArchRow) -> tuple[HopperTf32Tile, ...]:
        tiles = self.tiles(problem.spec, row)
        return tuple(t for t in tiles if tile_count(problem, t) < MAX_TILES)

    def launches(self, problem: GemmProblem, tile: HopperTf32Tile, device: Device) -> Launches:
        if problem.spec.view != "pointers":
            return Launches((Launch(self, problem, tile),))
        return Launches(
            (Launch(self, problem, tile, dict.fromkeys((*_MAPS, "origin"), 0)),), ORIGIN_BYTES
        )

    def accumulators(self, spec: GemmSpec, tile: HopperTf32Tile) -> Iterable[int]:
        columns = tile.bm if tile.swap_ab else tile.bn
        return columns, columns // 2

    def constants(self, spec: GemmSpec, tile: HopperTf32Tile, row: ArchRow) -> Constants:
        producer, consumer = TF32_REGISTERS[tile.groups, tile.loaders, tile.blocks]
        return {
            "PRODUCTS": TF32_PRODUCTS[spec.precision],
            "SWAP_AB": tile.swap_ab,
            "LEFT_TRANSPOSED": tile.swap_ab or spec.a_transposed,
            "POINTERS": spec.view == "pointers",
            "BIAS": DEVICE_TYPE[spec.bias],
            "RESIDUAL": spec.residual is not None,
            **members(spec, "vector_c", "vector_r"),
            **members(tile, "bm", "bn", "groups", "loaders", "stages", "cluster", "group_rows"),
            "SHARED_A": False,
            "BLOCKS": tile.blocks,
            "PRODUCER_REGISTERS": producer,
            "CONSUMER_REGISTERS": consumer,
            "SHARED_BYTES": tile.shared_bytes,
        }

    def signature(self, spec: GemmSpec) -> Signature:
        return Signature(
            (
                *((m, "tensor_map") for m in _MAPS),
                *((p, "pointer") for p in _POINTERS),
                *((s, "i64") for s in _STRIDES),
                *((i, "i32") for i in _INTS),
                ("alpha", "f32"),
                ("beta", "f32"),
                ("order", ORDER),
                ("b_heads", divider_parameter("b_heads")),
            )
        )

    def grid(self, problem: GemmProblem, tile: HopperTf32Tile, device: Device) -> int:
        blocks = max(device.limits.compute_units, 1) * tile.blocks
        return least(tile_count(problem, tile), blocks)

    def threads(self, tile: HopperTf32Tile, row: ArchRow) -> int:
        return 128 * (tile.groups + tile.loaders)

    def values(
        self, problem: GemmProblem, tile: HopperTf32Tile, device: Device
    ) -> dict[str, int | float]:
        p = problem
        strides = (*p.c_strides[:2], *p.bias_strides, *p.residual_strides[:2])
        ints = (
            p.c_strides[2],
            p.residual_strides[2],
            p.M,
            p.N,
            divide_up(p.K, SLICE),
            *steps(p.num_heads, p.batch, p.a_strides),
            *steps(p.num_heads // p.b_head_group, p.batch, p.b_strides),
        )
        values = dict(zip(_STRIDES, strides, strict=True)) | dict(zip(_INTS, ints, strict=True))
        return {**values, **order_values(p, tile), "alpha": p.alpha, "beta": p.beta}

    def pointers(self, spec: GemmSpec) -> dict[str, str]:
        suffix = "_ptrs" if spec.view == "pointers" else ""
        added = {n: f"{n}{suffix}" if getattr(spec, n) else "" for n in ("bias", "residual")}
        return {"a": f"A{suffix}", "b": f"B{suffix}", "c": f"C{suffix}", **added, "origin": ""}

    def tensor_maps(
        self, problem: GemmProblem, tile: HopperTf32Tile, device: Device
    ) -> dict[str, TensorMap]:
        """Axes of the factor's rows in memory, as for HopperGemm. One that lies along K comes as a
        tile's whole side, else by panels."""
        p, spec = problem, problem.spec
        rounded = spec.precision == "tf32"
        along_k = tile.bm, tile.bn
        a_box = (_PANEL, SLICE) if spec.a_transposed else (SLICE, along_k[0])
        b_box = (SLICE, along_k[1]) if spec.b_transposed else (_PANEL, SLICE)
        b_heads = p.num_heads // p.b_head_group
        a = tensor_map(p, "A", p.a_shape, (p.num_heads, p.batch), p.a_strides, a_box, rounded)
        b = tensor_map(p, "B", p.b_shape, (b_heads, p.batch), p.b_strides, b_box, rounded)
        return {"left_map": b, "right_map": a} if tile.swap_ab else {"left_map": a, "right_map": b}

    def work(self, problem: GemmProblem, tile: HopperTf32Tile, device: Device) -> Work:
        p = problem
        return Work(
            p.bytes_moved,
            tile_count(p, tile),
            2.0 * tile.bm * tile.bn * SLICE * divide_up(p.K, SLICE),
            dtype=DType.float32,
            rate=tile.rate,
            block_seconds=tile.block_seconds,
        )
