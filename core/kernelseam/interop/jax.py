"""Attention and matrix products that JAX compiles and differentiates, on hosts and on GPUs that a
plugin knows.

The first use of one imports JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernelseam.interop.jax_attention import attention
    from kernelseam.interop.jax_gemm import bmm

__all__ = ["attention", "bmm"]

_HOMES = {"attention": "jax_attention", "bmm": "jax_gemm"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__package__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
