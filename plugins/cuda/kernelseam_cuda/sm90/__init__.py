"""Definitions of the kernels that are for Hopper alone: sm_90a, by TMA and wgmma; projections made
of them."""

from collections.abc import Callable, Iterator
from typing import Any

from kernelseam.kernels.gemm.host import GemmDefinition
from kernelseam.kernels.projection import products
from kernelseam.kernels.projection.host import Projection
from kernelseam.kernels.projection.products import Product

from kernelseam_cuda.sm90.attention import HopperAttention
from kernelseam_cuda.sm90.attention_bwd import HopperAttentionBwd
from kernelseam_cuda.sm90.gemm import HopperGemm
from kernelseam_cuda.sm90.tf32 import HopperTf32Gemm

_GEMM = HopperGemm()


class HopperProjection(Projection):
    """A projection of which Hopper's GEMM makes a product, the shared one the others."""

    def __init__(self, operation: str, made_of: Callable[[Any], Iterator[Product]]) -> None:
        super().__init__(operation, made_of, (_GEMM, GemmDefinition()), _GEMM.name, _GEMM.archs)


KERNELS = (
    HopperAttention(),
    HopperAttentionBwd(),
    _GEMM,
    HopperTf32Gemm(),
    HopperProjection("output_projection", products.output),
    HopperProjection("output_projection_bwd", products.output_bwd),
)

__all__ = [
    "KERNELS",
    "HopperAttention",
    "HopperAttentionBwd",
    "HopperGemm",
    "HopperProjection",
    "HopperTf32Gemm",
]
