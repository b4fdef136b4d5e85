"""What torch differentiates: ``attention``, ``attention_varlen``, ``bmm``, ``matmul2d``,
``fused_qkv_projection`` and ``fused_output_projection_residual`` on its tensors.

The first use of one imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernelseam.interop.torch_autograd import attention, attention_varlen
    from kernelseam.interop.torch_gemm import bmm, matmul2d
    from kernelseam.interop.torch_projection import (
        fused_output_projection_residual,
        fused_qkv_projection,
    )

__all__ = [
    "attention",
    "attention_varlen",
    "bmm",
    "fused_output_projection_residual",
    "fused_qkv_projection",
    "matmul2d",
]

_HOMES = {
    "attention": "torch_autograd",
    "attention_varlen": "torch_autograd",
    "bmm": "torch_gemm",
    "matmul2d": "torch_gemm",
    "fused_output_projection_residual": "torch_projection",
    "fused_qkv_projection": "torch_projection",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"kernelseam.interop.{_HOMES[name]}"), name)
