"""What the kernels of forward.h and decode.h take alike: options, constants, parameters and their
values."""

from __future__ import annotations

from kernelseam.contract import ArchRow
from kernelseam.descriptors.attention.options import ANY_VIEW, STORED, SpecOption
from kernelseam.descriptors.attention.problem import AttentionProblem, AttentionSpec
from kernelseam.kernels.attention.arguments import (
    MATRICES,
    PAGES,
    SEQUENCES,
    VIEWS,
    forward_values,
    matrices,
    page_values,
    row_values,
)
from kernelseam.kernels.attention.fp8 import fp8_constants, fp8_values, with_scales
from kernelseam.kernels.attention.scores import (
    SCORE_OPTIONS,
    SCORES,
    refuse_scores,
    score_constants,
    score_values,
    with_expression,
)
from kernelseam.kernels.config import Constants
from kernelseam.kernels.elements import (
    DEVICE_TYPE,
    divider_parameter,
    divider_values,
    refuse_row_strides,
    row_strides,
)
from kernelseam.kernels.signature import Signature, Structure

SUPPORTED = (
    SCORE_OPTIONS
    | ANY_VIEW
    | STORED
    | SpecOption.dtype_out
    | SpecOption.batch_invariant
    | SpecOption.expression
    | SpecOption.precision
)
"""The options that both have."""


def forward_signature(parts: Structure, spec: AttentionSpec) -> Signature:
    """The parameters, last but for the scales those of a kernel's own: how work is parted."""
    signature = Signature(
        (
            *((name, matrices(name)) for name in MATRICES),
            ("lse", row_values("lse")),
            ("score", SCORES),
            ("sinks", "pointer"),
            ("sequences", SEQUENCES),
            ("pages", PAGES),
            ("num_heads", "i32"),
            ("group", divider_parameter("head_group")),
            ("parts", parts),
        ),
        flat=True,
    )
    return with_scales(with_expression(signature, spec), spec)


def shared_values(p: AttentionProblem) -> dict[str, int | float]:
    """Those of all parameters but ``parts``."""
    return {
        **forward_values(p),
        **score_values(p),
        **fp8_values(p),
        **page_values(p),
        "num_heads": p.num_heads,
        **divider_values("head_group", p.head_group),
    }


def spec_constants(spec: AttentionSpec) -> Constants:
    """The constants that every kernel of an attention has, gradients too: its element type, head
    dims, scores and masks, and how operands lie."""
    return {
        "T": DEVICE_TYPE[spec.dtype],
        "DQK": spec.head_dim,
        "DV": spec.value_dim,
        **score_constants(spec),
        "Q_VIEW": VIEWS[spec.q_view],
        "KV_VIEW": VIEWS[spec.kv_view],
        "LENGTHS": spec.lengths,
    }


def shared_constants(spec: AttentionSpec) -> Constants:
    return {
        **spec_constants(spec),
        "OUT": DEVICE_TYPE[spec.out],
        **fp8_constants(spec),
        "VECTOR": spec.vector,
    }


def refuse_dims(spec: AttentionSpec) -> str | None:
    """Why rows without columns are not taken."""
    for name, dim in (("head_dim", spec.head_dim), ("value_dim", spec.value_dim)):
        if dim < 1:
            return f"{name} = {dim}: it takes 1 and more"
    return None


def no_tile(spec: AttentionSpec, row: ArchRow) -> str:
    """The refusal where no tile takes a spec."""
    return (
        f"no tile of {row.arch} takes {spec.dtype} with head dims {spec.head_dim} and "
        f"{spec.value_dim}"
    )


def refuse_strides(p: AttentionProblem) -> str | None:
    """Why rows lie too far apart."""
    return refuse_scores(p) or refuse_row_strides(**row_strides(p, *MATRICES))
