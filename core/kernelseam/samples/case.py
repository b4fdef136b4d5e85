"""A case of any operation."""

from __future__ import annotations

from kernelseam.samples.attention_bwd_case import BackwardCase
from kernelseam.samples.attention_case import AttentionCase
from kernelseam.samples.cache_case import CacheCase
from kernelseam.samples.gemm_case import GemmCase
from kernelseam.samples.grouped_case import GroupedCase
from kernelseam.samples.grouped_pointers_case import GroupedPointersCase
from kernelseam.samples.merge_case import MergeCase
from kernelseam.samples.projection_case import ProjectionCase

Case = (
    GemmCase
    | GroupedCase
    | GroupedPointersCase
    | AttentionCase
    | MergeCase
    | CacheCase
    | BackwardCase
    | ProjectionCase
)
"""One problem with its data, written down as data."""
