"""The projections as compositions of GEMMs: one launch a product."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from kernelseam.contract import ArchRow, Composition, Device, Launch, Launches
from kernelseam.costs import predicted
from kernelseam.descriptors.projection.problem import QkvProjectionProblem
from kernelseam.frozen import dataclass
from kernelseam.kernels.definition import KernelDefinition
from kernelseam.kernels.elements import refuse_row_strides
from kernelseam.kernels.gemm.gemm import GemmDefinition
from kernelseam.kernels.projection import products
from kernelseam.kernels.projection.products import Product


@dataclass(frozen=True)
class Configuration:
    """A kernel for a product, with its tile."""

    kernel: KernelDefinition
    tile: Any

    @property
    def name(self) -> str:
        """The tile's name, "" where it has none; for a kernel other than the shared one, after the
        kernel's name."""
        name: str = getattr(self.tile, "name", "")
        return name if self.kernel.name == Composition.name else f"{self.kernel.name} {name}"


class Projection(Composition):
    """An operation whose launches are GEMMs, and what is done to their results after them.

    ``kernels``: kernels of the operation "gemm"; each product uses the one with the least predicted
    time of those that take it. By default the shared one alone. A plugin that has faster ones
    passes them before it, with a name and archs of its own; then the shared one makes what they do
    not take.
    """

    def __init__(
        self,
        operation: str,
        products_of: Callable[[Any], Iterator[Product]],
        kernels: tuple[KernelDefinition, ...] = (GemmDefinition(),),
        name: str = Composition.name,
        archs: tuple[str, ...] = (),
    ) -> None:
        self.operation, self.name, self.archs = operation, name, archs
        self._products_of, self._kernels = products_of, kernels

    def refuse(self, problem: Any, row: ArchRow) -> str | None:
        preferred, own, takes_part = self._kernels[0], self._kernels[:-1], False
        for product in self._products_of(problem):
            able = self._kernels_for(product, row)
            if not able:
                of = product.kernel or preferred
                return f"{product.name}: {of.refuse(product.problem, row)}"
            takes_part |= any(kernel in able for kernel in own)
        if len(self._kernels) > 1 and not takes_part:
            return f"none of its products is for {preferred.entry}"
        return _refuse_heads(problem) if isinstance(problem, QkvProjectionProblem) else None

    def _kernels_for(self, product: Product, row: ArchRow) -> list[KernelDefinition]:
        kernels = self._kernels if product.kernel is None else (product.kernel,)
        return [kernel for kernel in kernels if kernel.refuse(product.problem, row) is None]

    def _preferred_for(self, product: Product, row: ArchRow) -> list[KernelDefinition]:
        """Those of its own; the shared one where none of them takes the product. What is faster by
        the shared one alone is another implementation's, which dispatch knows."""
        able = self._kernels_for(product, row)
        return [kernel for kernel in able if kernel in self._kernels[:-1]] or able

    def tile(self, problem: Any, row: ArchRow, device: Device) -> tuple[Configuration, ...]:
        """One a product."""

        def seconds(product: Product, configuration: Configuration) -> float:
            return predicted(
                configuration.kernel.work(product.problem, configuration.tile, device),
                row.costs,
                device.limits,
            )

        return tuple(
            min(
                (
                    Configuration(kernel, kernel.tile(p.problem, row, device))
                    for kernel in self._preferred_for(p, row)
                ),
                key=lambda c, p=p: seconds(p, c),  # type: ignore[misc]
            )
            for p in self._products_of(problem)
        )

    def takes(
        self, problem: Any, tile: tuple[Configuration, ...], row: ArchRow, device: Device
    ) -> bool:
        gemms = tuple(self._products_of(problem))
        return len(gemms) == len(tile) and all(
            c.kernel.refuse(p.problem, row) is None
            and c.kernel.takes(p.problem, c.tile, row, device)
            for p, c in zip(gemms, tile, strict=True)
        )

    def variants(
        self, problem: Any, row: ArchRow, device: Device
    ) -> dict[str, tuple[Configuration, ...]]:
        """Every configuration of each product with every one of the others, that of ``tile``
        first."""
        chosen = self.tile(problem, row, device)
        offered = [
            dict.fromkeys(
                (
                    first,
                    *(
                        Configuration(kernel, t)
                        for kernel in self._kernels_for(p, row)
                        for t in kernel.variants(p.problem, row, device).values()
                    ),
                )
            )
            for first, p in zip(chosen, self._products_of(problem), strict=True)
        ]
        return {
            "+".join(c.name for c in combination if c.name): combination
            for combination in itertools.product(*offered)
        }

    def launches(self, problem: Any, tile: tuple[Configuration, ...], device: Device) -> Launches:
        gemms = tuple(self._products_of(problem))
        steps = tuple(_launch(p, c, device) for p, c in zip(gemms, tile, strict=True))
        return Launches(steps, max((p.workspace_bytes for p in gemms), default=0))


def _launch(product: Product, configuration: Configuration, device: Device) -> Launch:
    """A product by its kernel, whose tensor maps walk operands of the projection, or the
    workspace."""
    kernel, tile = configuration.kernel, configuration.tile
    operands, workspace = dict(product.operands), dict(product.workspace)
    for parameter, tensor_map in kernel.tensor_maps(product.problem, tile, device).items():
        name = tensor_map.operand.lower()
        if name in product.workspace:
            workspace[parameter] = product.workspace[name]
        else:
            operands[parameter] = product.operands[name]
    return Launch(kernel, product.problem, tile, workspace, operands)


def _refuse_heads(p: QkvProjectionProblem) -> str | None:
    if p.spec.heads.rotary and p.heads.head_dim % 2:
        return (
            f"head_dim = {p.heads.head_dim} is odd: elements that are rotated together lie in "
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
