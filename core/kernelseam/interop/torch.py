"""The functions on torch tensors, with gradients where there are any, torch's
scaled_dot_product_attention by ours, and ours as torch's flash attention.

The first use of one imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernelseam.lazy import imported_at_use

if TYPE_CHECKING:
    from kernelseam.interop.torch_autograd import attention, attention_varlen
    from kernelseam.interop.torch_flash import register_flash_attention
    from kernelseam.interop.torch_gemm import bmm, grouped_mm_list, matmul2d
    from kernelseam.interop.torch_grouped import grouped_mm
    from kernelseam.interop.torch_merge import merge_states
    from kernelseam.interop.torch_paged import attention_paged
    from kernelseam.interop.torch_projection import (
        fused_output_projection_residual,
        fused_qkv_projection,
    )
    from kernelseam.interop.torch_sdpa import scaled_dot_product_attention

__all__ = [
    "attention",
    "attention_paged",
    "attention_varlen",
    "bmm",
    "fused_output_projection_residual",
    "fused_qkv_projection",
    "grouped_mm",
    "grouped_mm_list",
    "matmul2d",
    "merge_states",
    "register_flash_attention",
    "scaled_dot_product_attention",
]

_NAMES = {
    ".torch_autograd": "attention attention_varlen",
    ".torch_flash": "register_flash_attention",
    ".torch_gemm": "bmm grouped_mm_list matmul2d",
    ".torch_grouped": "grouped_mm",
    ".torch_merge": "merge_states",
    ".torch_paged": "attention_paged",
    ".torch_projection": "fused_output_projection_residual fused_qkv_projection",
    ".torch_sdpa": "scaled_dot_product_attention",
}
__getattr__, __dir__ = imported_at_use(globals(), _NAMES)
