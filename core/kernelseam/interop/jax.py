"""Attention and matrix products that JAX compiles and differentiates, on hosts and on GPUs that a
plugin knows.

The first use of one imports JAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernelseam.lazy import imported_at_use

if TYPE_CHECKING:
    from kernelseam.interop.jax_attention import attention
    from kernelseam.interop.jax_gemm import bmm

__all__ = ["attention", "bmm"]

_NAMES = {
    ".jax_attention": "attention",
    ".jax_gemm": "bmm",
}
__getattr__, __dir__ = imported_at_use(globals(), _NAMES)
