"""The projections as compositions of GEMMs: one launch a product."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kernelseam.contract import ArchRow, Composition, Device, Launch, Launches
from kernelseam.costs import predicted
from kernelseam.descriptors.projection.problem import QkvProjectionProblem
from kernelseam.kernels.elements import refuse_row_strides
from kernelseam.kernels.gemm.host import GemmHost
from kernelseam.kernels.host_half import HostHalf
from kernelseam.kernels.projection import products
from kernelseam.kernels.projection.products import Product


@dataclass(frozen=True)
class Way:
    """A kernel for a product, with its tile."""

    half: HostHalf
    tile: Any

    @property
    def name(self) -> str:
        """The tile's; of a kernel that is not the shared one after its own."""
        name: str = self.tile.name
        return name if self.half.name == Composition.name else f"{self.half.name} {name}"


class Projection(Composition):
    """An operation whose launches are GEMMs that know nothing of each other.

    ``halves``: kernels of the operation "gemm"; each product goes to that which should take the
    least time. By default the shared one alone. A plugin that has a faster one gives both, with a
    name and the archs of its own.
    """

    def __init__(
        self,
        operation: str,
        made_of: Callable[[Any], Iterator[Product]],
        halves: tuple[HostHalf, ...] = (GemmHost(),),
        name: str = Composition.name,
        archs: tuple[str, ...] = (),
    ) -> None:
        self.operation, self.name, self.archs = operation, name, archs
        self._made_of, self._halves = made_of, halves

    def refuse(self, problem: Any, row: ArchRow) -> str | None:
        first, taken = self._halves[0], False
        for product in self._made_of(problem):
            takers = self._takers(product, row)
            if not takers:
                return f"{product.name}: {first.refuse(product.problem, row)}"
            taken |= first in takers
        if len(self._halves) > 1 and not taken:
            return f"none of its products is for {first.entry}"
        return _refuse_heads(problem) if isinstance(problem, QkvProjectionProblem) else None

    def _takers(self, product: Product, row: ArchRow) -> list[HostHalf]:
        return [half for half in self._halves if half.refuse(product.problem, row) is None]

    def tile(self, problem: Any, row: ArchRow, device: Device) -> tuple[Way, ...]:
        """One a product."""

        def seconds(product: Product, way: Way) -> float:
            return predicted(
                way.half.work(product.problem, way.tile, device), row.costs, device.limits
            )

        return tuple(
            min(
                (Way(half, half.tile(p.problem, row, device)) for half in self._takers(p, row)),
                key=lambda w, p=p: seconds(p, w),  # type: ignore[misc]
            )
            for p in self._made_of(problem)
        )

    def variants(self, problem: Any, row: ArchRow, device: Device) -> dict[str, tuple[Way, ...]]:
        """Every way of each product beside every one of the others, that of ``tile`` first."""
        chosen = self.tile(problem, row, device)
        offered = [
            dict.fromkeys(
                (
                    first,
                    *(
                        Way(half, t)
                        for half in self._takers(p, row)
                        for t in half.variants(p.problem, row, device).values()
                    ),
                )
            )
            for first, p in zip(chosen, self._made_of(problem), strict=True)
        ]
        return {"+".join(w.name for w in ways): ways for ways in itertools.product(*offered)}

    def launches(self, problem: Any, tile: tuple[Way, ...], device: Device) -> Launches:
        found = tuple(self._made_of(problem))
        steps = tuple(
            Launch(w.half, p.problem, w.tile, p.workspace, {**p.operands, **_walked(p, w, device)})
            for p, w in zip(found, tile, strict=True)
        )
        return Launches(steps, max((p.workspace_bytes for p in found), default=0))


def _walked(product: Product, way: Way, device: Device) -> dict[str, str]:
    """Whose memory the tensor maps of a product's kernel walk."""
    maps = way.half.tensor_maps(product.problem, way.tile, device)
    return {parameter: product.operands[m.operand.lower()] for parameter, m in maps.items()}


def _refuse_heads(p: QkvProjectionProblem) -> str | None:
    if p.spec.heads.rotary and p.heads.head_dim % 2:
        return (
            f"head_dim = {p.heads.head_dim} is odd: elements that are turned together lie in "
            "one pair of columns"
        )
    return refuse_row_strides(
        stride_cos_row=p.heads.rotary_stride,
        stride_positions_row=p.heads.positions_strides[1],
        stride_table_row=p.heads.table_stride,
    )


PROJECTIONS = (
    Projection("qkv_projection", products.qkv),
    Projection("output_projection", products.output),
    Projection("qkv_projection_bwd", products.qkv_bwd),
    Projection("output_projection_bwd", products.output_bwd),
)
