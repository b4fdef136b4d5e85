"""Host half of gemm.h: which tile, which constants, which arguments."""

from __future__ import annotations

from dataclasses import dataclass

from kernelseam.contract import ArchRow, Device
from kernelseam.descriptors.gemm_problem import GemmProblem, GemmSpec
from kernelseam.dtypes import DType
from kernelseam.kernels.elements import DEVICE_TYPE, INT32, divide_up, refuse_dtype, refuse_row_strides
from kernelseam.kernels.launches import Launch, Launches
from kernelseam.kernels.signature import Signature


@dataclass(frozen=True)
class GemmTile:
    """A row of an arch's table: a BM×BN tile of C a block, slices of BK, a ring of ``stages`` slices."""

    dtypes: frozenset[DType]
    bm: int
    bn: int
    bk: int
    warps_m: int
    warps_n: int
    stages: int
    min_blocks: int = 1
    """Blocks that share a compute unit; bounds the registers, and how many persistent blocks are started."""
    persistent: bool = True
    """Whether a block computes tile after tile, copying the next one's slices ahead; else one, in less memory."""

    def shared_bytes(self, spec: GemmSpec) -> int:
        """The ring, and the tile of C: beside it where blocks are persistent, else in its place."""
        ring = self.stages * (self.bm + self.bn) * self.bk * spec.dtype.itemsize
        result = self.bm * self.bn * spec.dtype_c.itemsize
        return ring + result if self.persistent else max(ring, result)

    def count(self, problem: GemmProblem) -> int:
        """Tiles of all matrices."""
        return divide_up(problem.M, self.bm) * divide_up(problem.N, self.bn) * problem.matrices


_STRIDES = ("a_batch", "a_head", "b_batch", "b_head", "c_batch", "c_head")
_INTS = ("a_row", "b_row", "c_row", "M", "N", "K", "num_heads", "b_head_group", "tiles_m", "tiles_n", "total",
         "blocks")


class GemmHost:
    """Tiles of C of all matrices of a batch, dealt to one grid."""

    operation = "gemm"
    entry = "gemm"
    source = "gemm/gemm.h"

    def refuse(self, problem: GemmProblem, row: ArchRow) -> str | None:
        spec = problem.spec
        if not self.tiles(spec, row):
            return f"no tile of {row.arch} takes {spec.dtype} to {spec.dtype_c}"
        if (count := min(t.count(problem) for t in self.tiles(spec, row))) >= INT32:
            return f"it has {count} tiles of C, not fewer than 2^31"
        return refuse_dtype(spec.dtype, row) or refuse_row_strides(
            stride_a_row=problem.a_strides[2], stride_b_row=problem.b_strides[2], stride_c_row=problem.c_strides[2]
        )

    def tiles(self, spec: GemmSpec, row: ArchRow) -> tuple[GemmTile, ...]:
        return tuple(
            t for t in row.tiles.get("gemm", ())
            if spec.dtype in t.dtypes and t.shared_bytes(spec) <= row.shared_bytes_per_block
        )

    def tile(self, problem: GemmProblem, row: ArchRow, device: Device) -> GemmTile:
        """The tile that needs the least time in a model of one: rounds of tiles over the compute units, each tile
        paying for its area, and for its two edges what loading and starting costs."""

        def time(t: GemmTile) -> float:
            rounds = divide_up(t.count(problem), max(device.limits.compute_units, 1))
            return rounds * (t.bm * t.bn + 32 * (t.bm + t.bn))

        return min((t for t in self.tiles(problem.spec, row) if t.count(problem) < INT32), key=time)

    def launches(self, problem: GemmProblem, tile: GemmTile, device: Device) -> Launches:
        return Launches((Launch(self, problem, tile),))

    def defines(self, spec: GemmSpec, tile: GemmTile, row: ArchRow) -> dict[str, object]:
        return {
            "T": DEVICE_TYPE[spec.dtype], "TC": DEVICE_TYPE[spec.dtype_c],
            "A_TRANSPOSED": spec.a_transposed, "B_TRANSPOSED": spec.b_transposed, "POINTERS": spec.view == "pointers",
            "VECTOR_A": spec.vector_a, "VECTOR_B": spec.vector_b, "VECTOR_C": spec.vector_c,
            "BM": tile.bm, "BN": tile.bn, "BK": tile.bk, "WARPS_M": tile.warps_m, "WARPS_N": tile.warps_n,
            "STAGES": tile.stages, "PERSISTENT": tile.persistent, "MIN_BLOCKS": tile.min_blocks,
            "SHARED_BYTES": tile.shared_bytes(spec),
        }

    def signature(self, spec: GemmSpec) -> Signature:
        scalar = "f64" if spec.dtype_acc is DType.float64 else "f32"
        return Signature((
            *((p, "pointer") for p in ("a", "b", "c")), *((s, "i64") for s in _STRIDES), *((i, "i32") for i in _INTS),
            ("alpha", scalar), ("beta", scalar),
        ))

    def grid(self, problem: GemmProblem, tile: GemmTile, device: Device) -> int:
        """As many blocks as the device holds at once, each taking every grid-th tile; or one a tile."""
        if not tile.persistent:
            return tile.count(problem)
        return min(tile.count(problem), max(device.limits.compute_units, 1) * tile.min_blocks)

    def threads(self, tile: GemmTile, row: ArchRow) -> int:
        return row.warp_size * tile.warps_m * tile.warps_n

    def shared_bytes(self, spec: GemmSpec, tile: GemmTile) -> int:
        return tile.shared_bytes(spec)

    def values(self, problem: GemmProblem, tile: GemmTile, device: Device) -> dict[str, int | float]:
        reads = problem.reads_inputs
        strides = (*problem.a_strides[:2], *problem.b_strides[:2], *problem.c_strides[:2])
        return {
            **dict(zip(_STRIDES, strides, strict=True)),
            "a_row": problem.a_strides[2], "b_row": problem.b_strides[2], "c_row": problem.c_strides[2],
            "M": problem.M, "N": problem.N, "K": problem.K if reads else 0,
            "num_heads": problem.num_heads, "b_head_group": problem.b_head_group,
            "tiles_m": divide_up(problem.M, tile.bm), "tiles_n": divide_up(problem.N, tile.bn),
            "total": tile.count(problem), "blocks": self.grid(problem, tile, device),
            "alpha": problem.alpha if reads else 0.0, "beta": problem.beta,
        }

    def pointers(self, spec: GemmSpec) -> dict[str, str]:
        suffix = "_ptrs" if spec.view == "pointers" else ""
        return {"a": f"A{suffix}", "b": f"B{suffix}", "c": f"C{suffix}"}

    def efficiency(self, problem: GemmProblem) -> float:
        """Portable matrix-unit kernels reach about half of a tuned library; narrow accesses half of that."""
        spec = problem.spec
        return 0.55 if min(spec.vector_a, spec.vector_b, spec.vector_c) >= 16 else 0.25
