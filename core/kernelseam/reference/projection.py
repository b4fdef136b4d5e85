"""The projections on the host: their products, and what is launched after them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kernelseam.contract import Device, LaunchRecord, PlanParts
from kernelseam.kernels.projection import products
from kernelseam.kernels.projection.products import Product
from kernelseam.reference.cache import CacheStep
from kernelseam.reference.gemm import GemmStep
from kernelseam.reference.implementation import NumpyImplementation, operand_arrays
from kernelseam.reference.rotary import HeadsStore

_NAMES = {"a": "A", "b": "B", "c": "C"}
"""Operands of a product by its kernels' parameters, where these have other names."""


class NumpyProjection(NumpyImplementation[Any]):
    """Every dtype (16 bits computed in float32), any sizes and strides, every option."""

    def __init__(self, operation: str, products_of: Callable[[Any], Iterator[Product]]) -> None:
        self.operation, self._products_of = operation, products_of

    def build(self, problem: Any, device: Device) -> PlanParts:
        steps, size = list[_Step](), 0
        for product in self._products_of(problem):
            own: Any = CacheStep if product.kernel else _product_of(problem)
            step = own(product.problem, device)
            steps.append(_Step(step, product))
            scratch = step.threads * step.bytes if isinstance(step, GemmStep) else 0
            size = max(size, product.workspace_bytes + scratch)
        return PlanParts(tuple(steps), size)


def _product_of(projection: Any) -> Callable[[Any, Device], GemmStep]:
    def heads(pointers: Mapping[str, int]) -> HeadsStore:
        product, results = projection.product, {"q": "C", "k": "c1", "v": "c2"}
        places = {**pointers, **{name: pointers[c] for name, c in results.items()}}
        return HeadsStore(product, operand_arrays(product.operands, places))

    return lambda problem, device: GemmStep(
        problem, device, None if problem.heads is None else heads
    )


class _Step:
    """A step whose operands have other names, or lie in the workspace before its own part."""

    def __init__(self, step: Any, product: Product) -> None:
        self.step, self.product = step, product
        self.record: LaunchRecord = step.record

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        of = self.product
        named = {_NAMES.get(n, n): pointers.get(x, 0) for n, x in of.operands.items()}
        placed = {_NAMES.get(n, n): workspace + at for n, at in of.workspace.items()}
        launch: Callable[[int], None] = self.step.bind(
            {**pointers, **named, **placed}, workspace + of.workspace_bytes
        )
        return launch


PROJECTIONS = (
    NumpyProjection("qkv_projection", products.qkv),
    NumpyProjection("output_projection", products.output),
    NumpyProjection("qkv_projection_bwd", products.qkv_bwd),
    NumpyProjection("output_projection_bwd", products.output_bwd),
)
