"""Partial attentions joined, as torch differentiates them. Imports torch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernelseam.interop.torch_function import tensors, wanted
from kernelseam.interop.torch_library.dtypes import dtype_name
from kernelseam.interop.torch_library.merge import MERGE_STATES
from kernelseam.ops import merge


def merge_states(
    outs: Tensor,
    lses: Tensor,
    *,
    layout: str = "bhsd",
    out_dtype: Any = None,
    backend: str | None = None,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """``kernelseam.merge_states`` on torch tensors, with gradients to ``outs`` and ``lses``, of the
    result and of its LSE; they are formulas of torch's own operations, and differentiate again.
    ``out_dtype`` may be torch's. Shapes and dtypes are as there."""
    operands, traced = tensors({"outs": outs, "lses": lses}, ("outs", "lses"))
    options: dict[str, Any] = {
        "layout": layout,
        "backend": backend,
        "implementation": implementation,
    }
    if traced or wanted(operands, ("outs", "lses")):
        return MERGE_STATES(outs, lses, out_dtype=out_dtype, **options)  # type: ignore[no-any-return]
    return merge.merge_states(outs, lses, out_dtype=dtype_name(out_dtype), **options)
