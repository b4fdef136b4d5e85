"""What the attention forwards of single archs refuse alike."""

from __future__ import annotations

from kernelseam.descriptors.attention.options import SpecOption
from kernelseam.descriptors.attention.problem import AttentionSpec


def refuse_but_half_precision(spec: AttentionSpec, options: SpecOption) -> str | None:
    """Why a kernel of these options does not take a spec whose operands, or whose result, are of
    another dtype than one of 16 bits, or that has other options; or None."""
    if reason := spec.refused_by(options):
        return reason
    if spec.dtype.itemsize != 2:
        return f"it takes bfloat16 and float16, not {spec.dtype}"
    if spec.out is not spec.dtype:
        return f"its result is of {spec.dtype}, not {spec.out}"
    return None


def refuse_mixed_views(spec: AttentionSpec) -> str | None:
    """Why a kernel of strided or packed operands does not take such ones, or None."""
    if (spec.q_view, spec.kv_view) in (("strided", "strided"), ("packed", "packed")):
        return None
    return f"queries {spec.q_view} with keys {spec.kv_view}: it takes both strided or both packed"
