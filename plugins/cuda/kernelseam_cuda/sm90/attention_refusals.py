"""What neither Hopper's attention nor its gradients take."""

from __future__ import annotations

from kernelseam.descriptors.attention.problem import AttentionProblem, AttentionSpec
from kernelseam.kernels.attention.refusals import refuse_mixed_views

MAX_SEQUENCE = 2**30
"""Queries and keys of one sequence, together."""
DIM_STEP, MAX_DIM, FORWARD_MAX_DIM = 8, 256, 512
"""Head dims are multiples of the 16 bytes that TMA takes, up to those of the widest tiles."""


def refuse_dims(spec: AttentionSpec, most: int = MAX_DIM) -> str | None:
    """Why neither the forward nor the gradients take these head dims, or None."""
    if all(0 < d <= most and d % DIM_STEP == 0 for d in (spec.head_dim, spec.value_dim)):
        return None
    return f"head dims {spec.dims}: it takes multiples of {DIM_STEP} up to {most}"


def refuse_rows(p: AttentionProblem) -> str | None:
    """Why neither the forward nor the gradients take such rows of queries and keys, or None."""
    return refuse_mixed_views(p.spec) or refuse_rows_of_any_view(p)


def refuse_rows_of_any_view(p: AttentionProblem) -> str | None:
    """The same whatever their views."""
    if p.spec.vector < 16:
        return f"rows at multiples of {p.spec.vector} bytes: TMA takes multiples of 16"
    if p.scale <= 0:
        return f"scale = {p.scale}: it takes more than 0"
    if not (p.batch and p.num_heads and p.S_q and p.S_k):
        return "there is nothing to multiply"
    if (total := p.S_q + p.S_k) >= MAX_SEQUENCE:
        return f"S_q + S_k = {total}: it takes less than 2**30"
    return None
