"""Host halves of the kernels that are for Hopper alone: sm_90a, by TMA and wgmma; projections made of them."""

from kernelseam.kernels.gemm.host import GemmHost
from kernelseam.kernels.projection import products
from kernelseam.kernels.projection.host import Projection
from kernelseam_cuda.sm90.attention import HopperAttention
from kernelseam_cuda.sm90.gemm import HopperGemm

_GEMM = HopperGemm()
_EITHER = (_GEMM, GemmHost())
KERNELS = (
    HopperAttention(), _GEMM,
    Projection("output_projection", products.output, _EITHER, _GEMM.name, _GEMM.archs),
    Projection("output_projection_bwd", products.output_bwd, _EITHER, _GEMM.name, _GEMM.archs),
)

__all__ = ["KERNELS", "HopperAttention", "HopperGemm"]
