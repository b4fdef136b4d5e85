"""kernelseam as a package of Hugging Face's kernel hub: attention, batched and grouped products for
torch, on NVIDIA GPUs and on the host.

``kernels.get_kernel`` loads it; it needs torch and NumPy, and on a GPU what torch's CUDA wheels
bring along: cuda-bindings and nvrtc, by which kernels are compiled at their first use.
"""

from __future__ import annotations

from importlib import metadata

from kernelseam import errors, plugins
from kernelseam._version import __version__
from kernelseam.interop.torch import (
    attention,
    attention_paged,
    attention_varlen,
    bmm,
    grouped_mm,
    matmul2d,
    merge_states,
    scaled_dot_product_attention,
)
from kernelseam.interop.transformers import register as register_transformers

from hub import layers

varlen, paged = attention_varlen, attention_paged
plugins.shipped = [metadata.EntryPoint("cuda", f"{__name__}.kernelseam_cuda.plugin", plugins.GROUP)]

__all__ = [
    "__version__",
    "attention",
    "attention_paged",
    "attention_varlen",
    "bmm",
    "errors",
    "grouped_mm",
    "layers",
    "matmul2d",
    "merge_states",
    "paged",
    "register_transformers",
    "scaled_dot_product_attention",
    "varlen",
]
