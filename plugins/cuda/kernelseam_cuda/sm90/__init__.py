"""Definitions of the kernels that are for Hopper alone: sm_90a, by TMA and wgmma; projections made
of them."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kernelseam.kernels.covered import Covered
from kernelseam.kernels.gemm.host import GemmHost
from kernelseam.kernels.projection import products
from kernelseam.kernels.projection.host import Projection
from kernelseam.kernels.projection.products import Product

from kernelseam_cuda.sm90.attention import HopperAttention
from kernelseam_cuda.sm90.gemm import HopperGemm
from kernelseam_cuda.sm90.heads import HopperHeads

_GEMM, _HEADS = HopperGemm(), HopperHeads()


class HopperProjection(Projection):
    """A projection of which Hopper's GEMM makes a product, the shared one the others."""

    def __init__(
        self,
        operation: str,
        made_of: Callable[[Any], Iterator[Product]],
        kernel: HopperGemm = _GEMM,
    ) -> None:
        super().__init__(operation, made_of, (kernel, GemmHost()), _GEMM.name, _GEMM.archs)
        self._kernel = kernel

    def covering(self) -> Iterable[Covered]:
        """Of a kernel that is a projection's alone."""
        return self._kernel.covering() if self._kernel is not _GEMM else ()


KERNELS = (
    HopperAttention(),
    _GEMM,
    HopperProjection("qkv_projection", products.qkv, _HEADS),
    HopperProjection("output_projection", products.output),
    HopperProjection("qkv_projection_bwd", products.qkv_bwd),
    HopperProjection("output_projection_bwd", products.output_bwd),
)

__all__ = ["KERNELS", "HopperAttention", "HopperGemm", "HopperHeads", "HopperProjection"]
