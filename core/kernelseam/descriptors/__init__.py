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
from kernelseam.descriptors.pointers import BatchedGemmPointers

__all__ = [
    "Attention", "AttentionBwd", "AttentionBwdProblem", "AttentionBwdSpec", "AttentionPointers", "AttentionProblem",
    "AttentionSpec", "BatchedGemmPointers", "BatchedGemmStrided", "GemmProblem", "GemmSpec", "MergeProblem",
    "MergeSpec", "MergeStates",
]
