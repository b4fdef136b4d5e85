"""Host halves of the kernels that are for Hopper alone: sm_90a, by TMA and wgmma."""

from kernelseam_cuda.sm90.attention import HopperAttention

KERNELS = (HopperAttention(),)

__all__ = ["KERNELS", "HopperAttention"]
