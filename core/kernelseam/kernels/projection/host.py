"""The projections as compositions of GEMMs: one launch a product."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from kernelseam.contract import ArchRow, Device
from kernelseam.descriptors.projection_problem import QkvProjectionProblem
from kernelseam.kernels.elements import refuse_row_strides
from kernelseam.kernels.gemm.host import GemmHost, GemmTile
from kernelseam.kernels.kernel import Composition
from kernelseam.kernels.launches import Launch, Launches
from kernelseam.kernels.projection import products
from kernelseam.kernels.projection.products import Product

_GEMM = GemmHost()


class Projection(Composition):
    """An operation whose launches are GEMMs that know nothing of each other."""

    def __init__(self, operation: str, made_of: Callable[[Any], Iterator[Product]]) -> None:
        self.operation, self._made_of = operation, made_of

    def refuse(self, problem: Any, row: ArchRow) -> str | None:
        for product in self._made_of(problem):
            if reason := _GEMM.refuse(product.problem, row):
                return f"{product.name}: {reason}"
        return _refuse_heads(problem) if isinstance(problem, QkvProjectionProblem) else None

    def tile(self, problem: Any, row: ArchRow, device: Device) -> tuple[GemmTile, ...]:
        """One a product."""
        return tuple(_GEMM.tile(p.problem, row, device) for p in self._made_of(problem))

    def variants(self, problem: Any, row: ArchRow, device: Device) -> dict[str, tuple[GemmTile, ...]]:
        """Every tile of each product beside every one of the others, that of ``tile`` first."""
        offered = [_GEMM.variants(p.problem, row, device).values() for p in self._made_of(problem)]
        return {"+".join(t.name for t in tiles): tiles for tiles in itertools.product(*offered)}

    def launches(self, problem: Any, tile: tuple[GemmTile, ...], device: Device) -> Launches:
        found = tuple(self._made_of(problem))
        steps = tuple(
            Launch(_GEMM, p.problem, t, p.workspace, p.operands) for p, t in zip(found, tile, strict=True)
        )
        return Launches(steps, max((p.workspace_bytes for p in found), default=0))


def _refuse_heads(p: QkvProjectionProblem) -> str | None:
    if p.spec.heads.rotary and p.heads.head_dim % 2:
        return f"head_dim = {p.heads.head_dim} is odd: elements that are turned together lie in one pair of columns"
    return refuse_row_strides(
        stride_cos_row=p.heads.rotary_stride, stride_positions_row=p.heads.positions_strides[1],
        stride_table_row=p.heads.table_stride,
    )


PROJECTIONS = (
    Projection("qkv_projection", products.qkv), Projection("output_projection", products.output),
    Projection("qkv_projection_bwd", products.qkv_bwd), Projection("output_projection_bwd", products.output_bwd),
)
