"""Types of the public functions: results are arrays of the caller's kind.

The functions name their options one by one; overloads, which say what comes back, name them by the
classes here.
"""

from __future__ import annotations

from typing import Any, TypedDict, TypeVar

from kernelseam.descriptors.attention.options import Scores
from kernelseam.dtypes import DType
from kernelseam.expressions.block_mask import BlockMask
from kernelseam.expressions.scores import MaskMod, ScoreMod

Array = TypeVar("Array")
"""An array of whatever library the caller has."""


class ExecutionOptions(TypedDict, total=False):
    """Where a call runs, and by what."""

    backend: str | None
    implementation: str | None


class OnArrays(ExecutionOptions, total=False):
    """What functions on arrays of any library take beside."""

    out_dtype: DType | str | None
    stream: object


class OnTensors(ExecutionOptions, total=False):
    """What functions on torch tensors take beside."""

    out_dtype: Any
    bwd_implementation: str | None


class Functions(TypedDict, total=False):
    """Scores and masks that users write."""

    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    block_mask: BlockMask | Any


class Gradients(Scores, total=False):
    """Options of ``attention_bwd``."""

    kv_lengths: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    layout: str
    bias_gradient: bool
    sink_gradient: bool
    deterministic: bool


class Stored(TypedDict, total=False):
    """Keys, values and queries as they may be stored."""

    latent: bool
    row_scale_block: int | None
    q_scales: Any
    k_scales: Any
    v_scales: Any
    q_scale_block: int | None
    scale_block: int | None


class InPages(TypedDict, total=False):
    """Keys and values in pages, and queries that may be packed."""

    cu_seqlens_q: Any
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    layout: str
    kv_layout: str
    prefix_groups: int | None


class Packed(Scores, Functions, Stored, OnArrays, total=False):
    """Options of ``attention_varlen``."""

    batch_invariant: bool
    out: Any


class Dense(Packed, total=False):
    """Options of ``attention``."""

    kv_lengths: Any
    layout: str


class Paged(InPages, Packed, total=False):
    """Options of ``attention_paged``."""


class PackedTensors(Scores, Functions, OnTensors, total=False):
    """Options of ``interop.torch.attention_varlen``."""

    batch_invariant: bool
    deterministic: bool


class DenseTensors(PackedTensors, total=False):
    """Options of ``interop.torch.attention``."""

    kv_lengths: Any
    layout: str


class Sharded(Scores, OnTensors, total=False):
    """Options of ``distributed.attention``."""

    kv_lengths: Any
    return_lse: bool
    batch_invariant: bool
    deterministic: bool


class PagedTensors(InPages, Scores, Functions, Stored, ExecutionOptions, total=False):
    """Options of ``interop.torch.attention_paged``."""

    batch_invariant: bool
    out_dtype: Any


class DenseJax(Scores, total=False):
    """Options of ``interop.jax.attention``."""

    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    batch_invariant: bool
    kv_lengths: Any
    layout: str
    out_dtype: Any


class Qkv(TypedDict, total=False):
    """Options of the projection before an attention."""

    layout: str
    rotary: Any
    rotary_style: str
    positions: Any
    first_position: int
    block_table: Any
    slot_mapping: Any
    kv_lengths: Any
    cu_seqlens_q: Any
    k_scales: Any
    v_scales: Any
    kv_layout: str


class QkvArrays(Qkv, OnArrays, total=False):
    """Those of ``fused_qkv_projection``."""

    out: Any


class QkvTensors(Qkv, OnTensors, total=False):
    """Those of ``interop.torch.fused_qkv_projection``."""
