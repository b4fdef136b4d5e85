"""Descriptors: what host code fills in. Frozen and validated; problem and spec are derived."""

from kernelseam.descriptors.attention import Attention
from kernelseam.descriptors.gemm import BatchedGemmStrided
from kernelseam.descriptors.pointers import BatchedGemmPointers
from kernelseam.descriptors.problems import AttentionProblem, AttentionSpec, GemmProblem, GemmSpec

__all__ = [
    "Attention", "AttentionProblem", "AttentionSpec", "BatchedGemmPointers", "BatchedGemmStrided", "GemmProblem",
    "GemmSpec",
]
