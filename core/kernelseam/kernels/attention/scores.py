"""Kernel definition of scores.h: its constants, and what kernels hand to it."""

from __future__ import annotations

import math
from dataclasses import replace

from kernelseam.descriptors.attention.options import SpecOption
from kernelseam.descriptors.attention.problem import AttentionProblem, AttentionSpec
from kernelseam.kernels.attention.arguments import planes, row_values
from kernelseam.kernels.config import Constants, members
from kernelseam.kernels.elements import DEVICE_TYPE, refuse_row_strides
from kernelseam.kernels.expression import captured_values, expression_structure
from kernelseam.kernels.signature import Signature, Structure
from kernelseam.symbolic import least

SCORE_OPTIONS = (
    SpecOption.causal
    | SpecOption.window
    | SpecOption.prefix
    | SpecOption.mask
    | SpecOption.alibi
    | SpecOption.softcap
    | SpecOption.bias
    | SpecOption.sinks
)
"""What scores.h computes."""
LOG2_E = math.log2(math.e)
SCORE_STRIDES = (
    *(f"{n}_{axis}" for n in ("bias", "mask") for axis in ("batch", "head", "row", "column")),
    *("slopes_batch", "slopes_head"),
)

SCORES = Structure(
    (
        ("bias", planes("bias")),
        ("mask", planes("mask")),
        ("slopes", row_values("slopes")),
        ("prefixes", "pointer"),
        ("left", "i32"),
        ("right", "i32"),
        ("scale_log2", "f32"),
        ("cap", "f32"),
        ("cap_inverse", "f32"),
    )
)
"""ScoreArguments; ``score_values`` has its numbers."""


def score_constants(spec: AttentionSpec) -> Constants:
    return {
        **members(spec, "causal", "window", "prefix", "mask", "alibi", "softcap"),
        "BIAS": DEVICE_TYPE[spec.bias],
        "SINKS": spec.sinks,
        "CAPTURES": expression_structure(spec) is not None,
    }


def refuse_scores(problem: AttentionProblem) -> str | None:
    """Why queries or keys of a bias or a mask lie too far apart."""
    return refuse_row_strides(
        stride_bias_row=problem.bias_strides[2],
        stride_bias_column=problem.bias_strides[3],
        stride_mask_row=problem.mask_strides[2],
        stride_mask_column=problem.mask_strides[3],
    )


def score_values(problem: AttentionProblem) -> dict[str, int | float]:
    """Strides of bias, mask and slopes; the band; scale and cap in base 2."""
    p, widest, cap = problem, problem.S_q + problem.S_k, problem.softcap or 1.0
    strides = (*p.bias_strides, *p.mask_strides, *p.alibi_strides)
    return {
        **dict(zip(SCORE_STRIDES, strides, strict=True)),
        "left": widest if p.left is None else least(p.left, widest),
        "right": widest if p.right is None else least(p.right, widest),
        "scale_log2": p.scale * LOG2_E,
        "cap": cap * LOG2_E,
        "cap_inverse": p.scale / cap,
        **captured_values(p),
    }


def with_expression(signature: Signature, spec: AttentionSpec) -> Signature:
    """A kernel's signature, whose parameter "score" has what the spec's expression captures."""
    structure = expression_structure(spec)
    if structure is None:
        return signature
    own = Structure((("expression", structure), *SCORES.members))
    parameters = tuple((n, own if n == "score" else kind) for n, kind in signature.parameters)
    return replace(signature, parameters=parameters)
