"""Options of the projections on arrays: names, types, defaults, rules and words."""

from __future__ import annotations

from kernelseam.descriptors.common.layouts import KV_LAYOUTS, LAYOUTS, order
from kernelseam.descriptors.common.options import scalar
from kernelseam.descriptors.common.validation import extent, flag
from kernelseam.dtypes import DType
from kernelseam.frozen import dataclass


@dataclass(frozen=True, kw_only=True)
class LayoutOption:
    layout: str = scalar("bhsd", lambda n, x: order(n, x, LAYOUTS), "The order of the axes.")


@dataclass(frozen=True, kw_only=True)
class HeadOptions(LayoutOption):
    """What a weight's rows make; they are checked with the weight."""

    num_heads: int | None = scalar(None, None, "Heads of queries.")
    num_kv_heads: int | None = scalar(None, None, "Heads of keys and values. [num_heads]")
    head_dim: int | None = scalar(None, None, "Columns of a head. [as the weight has rows]")


@dataclass(frozen=True, kw_only=True)
class QkvOptions(HeadOptions):
    """All that ``fused_qkv_projection`` takes beside operands and where to run."""

    kv_layout: str = scalar(
        "nhd", lambda n, x: order(n, x, KV_LAYOUTS), "The order of the axes of a page."
    )
    rotary_style: str = scalar("halves", None, "Which elements rotate together: halves or pairs.")
    first_position: int = scalar(0, extent, "The position of an entry's first token.")
    out_dtype: DType | str | None = scalar(None, None, "The results' dtype. [input's]")


@dataclass(frozen=True, kw_only=True)
class OutputOptions(LayoutOption):
    """All that ``fused_output_projection_residual`` takes beside operands and where to run."""

    out_dtype: DType | str | None = scalar(None, None, "The result's dtype. [attn_out's]")


@dataclass(frozen=True, kw_only=True)
class GradientOptions:
    """Which gradients of a projection are computed."""

    has_bias: bool = scalar(False, flag, "There is a bias, whose gradient is computed.")
    input_gradient: bool = scalar(True, flag, "Compute the input's gradient.")
    weight_gradient: bool = scalar(True, flag, "Compute the weight's gradient.")
    bias_dtype: DType | str | None = scalar(None, None, "The dtype of the bias's gradient.")


@dataclass(frozen=True, kw_only=True)
class QkvGradientOptions(GradientOptions, HeadOptions):
    """All that ``fused_qkv_projection_bwd`` takes beside operands and where to run."""


@dataclass(frozen=True, kw_only=True)
class OutputGradientOptions(GradientOptions, LayoutOption):
    """All that ``fused_output_projection_residual_bwd`` takes beside operands and where to run."""
