"""Descriptors: what host code fills in. Frozen and validated; problem and spec are derived."""

from kernelseam.descriptors.attention import Attention
from kernelseam.descriptors.attention_bwd import AttentionBwd
from kernelseam.descriptors.attention_bwd_problem import AttentionBwdProblem, AttentionBwdSpec
from kernelseam.descriptors.attention_pointers import AttentionPointers
from kernelseam.descriptors.attention_problem import AttentionProblem, AttentionSpec
from kernelseam.descriptors.gemm import BatchedGemmStrided
from kernelseam.descriptors.gemm_problem import GemmProblem, GemmSpec
from kernelseam.descriptors.merge import MergeStates
from kernelseam.descriptors.merge_problem import MergeProblem, MergeSpec
from kernelseam.descriptors.output_projection import OutputProjection
from kernelseam.descriptors.pointers import BatchedGemmPointers
from kernelseam.descriptors.projection_bwd import OutputProjectionBwd, QkvProjectionBwd
from kernelseam.descriptors.projection_bwd_problem import (
    OutputProjectionBwdProblem,
    OutputProjectionBwdSpec,
    QkvProjectionBwdProblem,
    QkvProjectionBwdSpec,
)
from kernelseam.descriptors.projection_problem import (
    OutputProjectionProblem,
    OutputProjectionSpec,
    QkvProjectionProblem,
    QkvProjectionSpec,
)
from kernelseam.descriptors.qkv_projection import QkvProjection

__all__ = [
    "Attention",
    "AttentionBwd",
    "AttentionBwdProblem",
    "AttentionBwdSpec",
    "AttentionPointers",
    "AttentionProblem",
    "AttentionSpec",
    "BatchedGemmPointers",
    "BatchedGemmStrided",
    "GemmProblem",
    "GemmSpec",
    "MergeProblem",
    "MergeSpec",
    "MergeStates",
    "OutputProjection",
    "OutputProjectionBwd",
    "OutputProjectionBwdProblem",
    "OutputProjectionBwdSpec",
    "OutputProjectionProblem",
    "OutputProjectionSpec",
    "QkvProjection",
    "QkvProjectionBwd",
    "QkvProjectionBwdProblem",
    "QkvProjectionBwdSpec",
    "QkvProjectionProblem",
    "QkvProjectionSpec",
]
