"""What Hopper's attention takes, and what neither it nor its gradients do."""

from __future__ import annotations

import math

from kernelseam.descriptors.attention.options import ANY_VIEW, SpecOption
from kernelseam.descriptors.attention.problem import AttentionProblem, AttentionSpec
from kernelseam.kernels.attention.refusals import refuse_mixed_views
from kernelseam.kernels.attention.scores import SCORE_OPTIONS
from kernelseam.kernels.attention.scores import refuse_scores as refuse_far_rows

from kernelseam_cuda.sm90.attention_blocks import by_element, mask_axes

BANDED = (
    ANY_VIEW
    | SpecOption.causal
    | SpecOption.window
    | SpecOption.prefix
    | SpecOption.softcap
    | SpecOption.sinks
    | SpecOption.dtype_out
    | SpecOption.batch_invariant
)
"""Options by which scores are a multiple of the product, or capped, and a query sees a range of
keys."""
SUPPORTED = BANDED | SCORE_OPTIONS | SpecOption.expression
"""The options that the kernel has."""
MAX_SEQUENCE = 2**30
"""Queries and keys of one sequence, together."""
DIM_STEP, MAX_DIM, FORWARD_MAX_DIM = 8, 256, 512
"""Head dims are multiples of the 16 bytes that TMA takes, up to those of the widest tiles."""
_ELEMENT_MAX_DIM, _BIAS_MAX_DIM = 256, 128
"""Head dims up to which scores and masks by element have tiles, and biases."""
_FARTHEST_BIAS = 1 << 33
"""Bytes along an axis of entries, heads or rows, of which there are three."""
_REPEATED_BYTES = 1 << 27
"""Of the workspace for a mask that repeats: beyond, a kernel that reads it is better."""


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


def _mask_elements(p: AttentionProblem) -> tuple[int, int]:
    """Of a mask those in memory, and those that are kept as bits: of every row, and of each entry
    and head that tiles tell apart."""
    extents = (p.batch, p.num_heads, p.S_q, p.S_k)
    own = math.prod([n if s else 1 for n, s in zip(extents, p.mask_strides, strict=True)])
    entries, heads = mask_axes(p)
    return own, (p.batch if entries else 1) * (p.num_heads if heads else 1) * p.S_q * p.S_k


def refuse_scores(p: AttentionProblem) -> str | None:
    """Why it takes no such scores and masks, or None."""
    s = p.spec
    if s.prefix and s.window:
        return "a prefix beside a window"
    if not by_element(s):
        return None
    most, what = _ELEMENT_MAX_DIM, "scores or masks by element"
    if s.bias:
        most, what = _BIAS_MAX_DIM, "a bias"
    if max(s.head_dim, s.value_dim) > most:
        return f"{what} of head dims {s.dims}: it takes up to {most}"
    if s.mask:
        own, bits = _mask_elements(p)
        if bits > own and (kept := bits // 8) > _REPEATED_BYTES:
            return f"a mask that repeats, kept as {kept} bytes: it takes up to {_REPEATED_BYTES}"
    return refuse_far_scores(p)


def refuse_far_scores(p: AttentionProblem) -> str | None:
    """Why a bias' or a mask's rows lie too far apart for it and its gradients, or None: a row's
    place in a bias is counted in 16 bytes, in 32 bits."""
    if p.spec.bias:
        for extent, stride in zip((p.batch, p.num_heads, p.S_q), p.bias_strides, strict=False):
            if (bytes_ := extent * stride * p.spec.bias.itemsize) >= _FARTHEST_BIAS:
                return f"a bias' axis of {bytes_} bytes: it takes less than 2**33"
    return refuse_far_rows(p)
