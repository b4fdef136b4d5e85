"""Kernel definition of query_gradient.h: dq from the float32 sums that blocks of keys add to."""

from __future__ import annotations

from kernelseam.contract import ArchRow, Device
from kernelseam.descriptors.attention.backward_problem import AttentionBwdSpec
from kernelseam.descriptors.attention.problem import AttentionSpec
from kernelseam.dtypes import DType
from kernelseam.frozen import dataclass
from kernelseam.kernels.attention.backward_tile import BackwardTile, backward_tiles
from kernelseam.kernels.attention.row_kernels import SmallKernel
from kernelseam.kernels.config import Constants, members
from kernelseam.kernels.elements import DEVICE_TYPE, TF32_PRODUCTS, divide_up


@dataclass(frozen=True)
class QueryGradientSpec:
    """What shapes the binary, beside the tile."""

    dtype: DType
    head_dim: int
    packed: bool = False
    vector: int = 16
    precision: str | None = None
    """Of the product whose sums they are: by it accumulators lie in memory."""


@dataclass(frozen=True)
class QueryGradientProblem:
    """dq [batch, head, S_q, head_dim], or rows of several sequences; strides (batch, head, row)."""

    spec: QueryGradientSpec
    batch: int
    num_heads: int
    S_q: int
    total_q: int
    dq_strides: tuple[int, int, int]
    scale: float

    def sum_bytes(self, tile: BackwardTile) -> int:
        """The sums: float32 tiles of ``step`` queries; query_sums.h numbers them."""
        tiles = self.batch * divide_up(self.S_q, tile.step)
        if self.spec.packed:
            tiles = self.total_q // tile.step + self.batch
        return 4 * tiles * self.num_heads * tile.step * tile.width(self.spec.head_dim)


class QueryGradient(SmallKernel):
    """A block a tile."""

    entry, source = "query_gradient", "attention/query_gradient.h"
    pointer_names = ("sums", "dq", "offsets")
    stride_names = ("dq_batch", "dq_head")
    int_names = ("dq_row", "num_heads", "S_q", "tiles")
    float_names = ("scale",)

    def tiles(self, spec: QueryGradientSpec, row: ArchRow) -> tuple[BackwardTile, ...]:
        """Those with atomics of an attention with this head dim."""
        whole = AttentionBwdSpec(
            AttentionSpec(spec.dtype, spec.head_dim, spec.head_dim, precision=spec.precision),
            deterministic=False,
        )
        return tuple(t for t in backward_tiles(whole, row) if t.query_rows)

    def constants(self, spec: QueryGradientSpec, tile: BackwardTile, row: ArchRow) -> Constants:
        return {
            "T": DEVICE_TYPE[spec.dtype],
            "PRECISION": TF32_PRODUCTS[spec.precision],
            "DQK": spec.head_dim,
            **members(spec, "packed", "vector"),
            **members(tile, "warps", "column_warps", "step", "query_rows"),
        }

    def shared_bytes(self, spec: QueryGradientSpec, tile: BackwardTile) -> int:
        return tile.step * tile.width(spec.head_dim) * spec.dtype.itemsize

    def bytes_moved(self, problem: QueryGradientProblem, tile: BackwardTile) -> int:
        return problem.sum_bytes(tile) * (4 + problem.spec.dtype.itemsize) // 4

    def grid(self, problem: QueryGradientProblem, tile: BackwardTile, device: Device) -> int:
        return problem.batch * problem.num_heads * divide_up(problem.S_q, tile.step)

    def values(
        self, problem: QueryGradientProblem, tile: BackwardTile, device: Device
    ) -> dict[str, int | float]:
        p = problem
        tiles = max(divide_up(p.S_q, tile.step), 1)
        return {
            **self._values(p.dq_strides[:2], (p.dq_strides[2], p.num_heads, p.S_q, tiles)),
            "scale": p.scale,
        }


QUERY_GRADIENT = QueryGradient()
