"""Definitions of the kernels that are for Hopper alone: sm_90a, by TMA and wgmma; projections made
of them."""

from collections.abc import Callable, Iterator
from typing import Any

from kernelseam.kernels.gemm.gemm import GemmDefinition
from kernelseam.kernels.projection import products
from kernelseam.kernels.projection.products import Product
from kernelseam.kernels.projection.projection import Projection

from kernelseam_cuda.sm90 import joined
from kernelseam_cuda.sm90.attention import HopperAttention
from kernelseam_cuda.sm90.attention_bwd import HopperAttentionBwd
from kernelseam_cuda.sm90.attention_e4m3 import HopperE4m3Attention
from kernelseam_cuda.sm90.attention_prefix import PREFIX_GROUPS
from kernelseam_cuda.sm90.gemm import HopperGemm
from kernelseam_cuda.sm90.grouped import HopperGroupedGemm
from kernelseam_cuda.sm90.grouped_lists import HopperListedGemm
from kernelseam_cuda.sm90.heads import HopperHeads
from kernelseam_cuda.sm90.latent import HopperLatent
from kernelseam_cuda.sm90.tf32 import HopperTf32Gemm

_GEMM, HEADS = HopperGemm(), HopperHeads()


class HopperProjection(Projection):
    """A projection of which Hopper's GEMM makes a product, the shared one the others."""

    def __init__(
        self,
        operation: str,
        products_of: Callable[[Any], Iterator[Product]],
        own: tuple[HopperGemm, ...] = (_GEMM,),
    ) -> None:
        super().__init__(operation, products_of, (*own, GemmDefinition()), _GEMM.name, _GEMM.archs)


KERNELS = (
    HopperAttention(),
    PREFIX_GROUPS,
    HopperE4m3Attention(),
    HopperAttentionBwd(),
    HopperLatent(),
    _GEMM,
    HopperGroupedGemm(),
    HopperListedGemm(),
    HopperTf32Gemm(),
    HopperProjection("qkv_projection", products.qkv, (HEADS,)),
    HopperProjection("output_projection", joined.output(_GEMM)),
    HopperProjection("qkv_projection_bwd", joined.qkv_bwd(_GEMM)),
    HopperProjection("output_projection_bwd", joined.output_bwd(_GEMM, HEADS), (_GEMM, HEADS)),
)

__all__ = [
    "HEADS",
    "KERNELS",
    "HopperAttention",
    "HopperAttentionBwd",
    "HopperE4m3Attention",
    "HopperGemm",
    "HopperGroupedGemm",
    "HopperHeads",
    "HopperLatent",
    "HopperListedGemm",
    "HopperProjection",
    "HopperTf32Gemm",
]
