"""A parity case of any operation."""

from __future__ import annotations

from kernelseam.parity.cases.attention_bwd_case import BackwardCase
from kernelseam.parity.cases.attention_case import AttentionCase
from kernelseam.parity.cases.gemm_case import GemmCase
from kernelseam.parity.cases.merge_case import MergeCase
from kernelseam.parity.cases.projection_case import ProjectionCase

Case = GemmCase | AttentionCase | MergeCase | BackwardCase | ProjectionCase
"""One problem with its data, written down as data."""
