"""Types of the public functions: results are arrays of the caller's kind.

The functions name their options one by one; overloads, which say what comes back, name them by the
classes here.
"""

from __future__ import annotations

from typing import Any, TypedDict, TypeVar

from kernelseam.dtypes import DType

Array = TypeVar("Array")
"""An array of whatever library the caller has."""
Window = tuple[int | None, int | None] | None


class Ways(TypedDict, total=False):
    """Where a call runs, and by what."""

    backend: str | None
    implementation: str | None


class OnArrays(Ways, total=False):
    """What functions on arrays of any library take beside."""

    out_dtype: DType | str | None
    stream: object


class OnTensors(Ways, total=False):
    """What functions on torch tensors take beside."""

    out_dtype: Any
    bwd_implementation: str | None


class Scores(TypedDict, total=False):
    """How scores are computed and which keys a query sees."""

    window: Window
    scale: float | None
    softcap: float | None
    bias: Any
    mask: Any
    alibi_slopes: Any
    sinks: Any
    prefix_lengths: Any
    batch_invariant: bool


class Packed(Scores, OnArrays, total=False):
    """Options of ``attention_varlen``."""

    causal: bool
    out: Any
    q_scales: Any
    k_scales: Any
    v_scales: Any
    q_scale_block: int | None
    scale_block: int | None


class Dense(Packed, total=False):
    """Options of ``attention``."""

    kv_lengths: Any
    layout: str
    latent: bool


class Paged(Packed, total=False):
    """Options of ``attention_paged``."""

    cu_seqlens_q: Any
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    layout: str
    kv_layout: str
    latent: bool


class PackedTensors(Scores, OnTensors, total=False):
    """Options of ``interop.torch.attention_varlen``."""

    causal: bool
    deterministic: bool


class DenseTensors(PackedTensors, total=False):
    """Options of ``interop.torch.attention``."""

    kv_lengths: Any
    layout: str


class PagedTensors(Scores, Ways, total=False):
    """Options of ``interop.torch.attention_paged``."""

    causal: bool
    cu_seqlens_q: Any
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    layout: str
    kv_layout: str
    q_scales: Any
    k_scales: Any
    v_scales: Any
    q_scale_block: int | None
    scale_block: int | None
    latent: bool
    out_dtype: Any


class DenseJax(Scores, total=False):
    """Options of ``interop.jax.attention``."""

    causal: bool
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
    kv_layout: str


class QkvArrays(Qkv, OnArrays, total=False):
    """Those of ``fused_qkv_projection``."""

    out: Any


class QkvTensors(Qkv, OnTensors, total=False):
    """Those of ``interop.torch.fused_qkv_projection``."""
