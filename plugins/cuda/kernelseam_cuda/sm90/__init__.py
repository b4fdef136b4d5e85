"""Host halves of the kernels that are for Hopper alone: sm_90a, by TMA and wgmma."""

from kernelseam_cuda.sm90.attention import HopperAttention
from kernelseam_cuda.sm90.gemm import HopperGemm

KERNELS = (HopperAttention(), HopperGemm())

__all__ = ["KERNELS", "HopperAttention", "HopperGemm"]
