"""Descriptors: what host code fills in. Frozen and validated; problem and spec are derived. Each
operation's are imported at their first use."""

from typing import TYPE_CHECKING

from kernelseam.lazy import imported_at_use

if TYPE_CHECKING:
    from kernelseam.descriptors.attention.backward import AttentionBwd
    from kernelseam.descriptors.attention.backward_problem import (
        AttentionBwdProblem,
        AttentionBwdSpec,
    )
    from kernelseam.descriptors.attention.forward import Attention
    from kernelseam.descriptors.attention.merge import MergeStates
    from kernelseam.descriptors.attention.merge_problem import MergeProblem, MergeSpec
    from kernelseam.descriptors.attention.pointers import AttentionPointers
    from kernelseam.descriptors.attention.problem import AttentionProblem, AttentionSpec
    from kernelseam.descriptors.cache.cache import PagedCache
    from kernelseam.descriptors.cache.problem import PagedCacheProblem, PagedCacheSpec
    from kernelseam.descriptors.gemm.grouped import GroupedGemm
    from kernelseam.descriptors.gemm.grouped_pointers import GroupedGemmPointers
    from kernelseam.descriptors.gemm.grouped_pointers_problem import (
        GroupedGemmPointersProblem,
        GroupedGemmPointersSpec,
    )
    from kernelseam.descriptors.gemm.grouped_problem import GroupedGemmProblem, GroupedGemmSpec
    from kernelseam.descriptors.gemm.pointers import BatchedGemmPointers
    from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec
    from kernelseam.descriptors.gemm.strided import BatchedGemmStrided
    from kernelseam.descriptors.projection.backward import OutputProjectionBwd, QkvProjectionBwd
    from kernelseam.descriptors.projection.backward_problem import (
        OutputProjectionBwdProblem,
        OutputProjectionBwdSpec,
        QkvProjectionBwdProblem,
        QkvProjectionBwdSpec,
    )
    from kernelseam.descriptors.projection.output import OutputProjection
    from kernelseam.descriptors.projection.problem import (
        OutputProjectionProblem,
        OutputProjectionSpec,
        QkvProjectionProblem,
        QkvProjectionSpec,
    )
    from kernelseam.descriptors.projection.qkv import QkvProjection

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
    "GroupedGemm",
    "GroupedGemmPointers",
    "GroupedGemmPointersProblem",
    "GroupedGemmPointersSpec",
    "GroupedGemmProblem",
    "GroupedGemmSpec",
    "MergeProblem",
    "MergeSpec",
    "MergeStates",
    "OutputProjection",
    "OutputProjectionBwd",
    "OutputProjectionBwdProblem",
    "OutputProjectionBwdSpec",
    "OutputProjectionProblem",
    "OutputProjectionSpec",
    "PagedCache",
    "PagedCacheProblem",
    "PagedCacheSpec",
    "QkvProjection",
    "QkvProjectionBwd",
    "QkvProjectionBwdProblem",
    "QkvProjectionBwdSpec",
    "QkvProjectionProblem",
    "QkvProjectionSpec",
]

_NAMES = {
    ".attention.backward": "AttentionBwd",
    ".attention.backward_problem": "AttentionBwdProblem AttentionBwdSpec",
    ".attention.forward": "Attention",
    ".attention.merge": "MergeStates",
    ".attention.merge_problem": "MergeProblem MergeSpec",
    ".attention.pointers": "AttentionPointers",
    ".attention.problem": "AttentionProblem AttentionSpec",
    ".cache.cache": "PagedCache",
    ".cache.problem": "PagedCacheProblem PagedCacheSpec",
    ".gemm.grouped": "GroupedGemm",
    ".gemm.grouped_pointers": "GroupedGemmPointers",
    ".gemm.grouped_pointers_problem": "GroupedGemmPointersProblem GroupedGemmPointersSpec",
    ".gemm.grouped_problem": "GroupedGemmProblem GroupedGemmSpec",
    ".gemm.pointers": "BatchedGemmPointers",
    ".gemm.problem": "GemmProblem GemmSpec",
    ".gemm.strided": "BatchedGemmStrided",
    ".projection.backward": "OutputProjectionBwd QkvProjectionBwd",
    ".projection.backward_problem": (
        "OutputProjectionBwdProblem OutputProjectionBwdSpec QkvProjectionBwdProblem "
        "QkvProjectionBwdSpec"
    ),
    ".projection.output": "OutputProjection",
    ".projection.problem": (
        "OutputProjectionProblem OutputProjectionSpec QkvProjectionProblem QkvProjectionSpec"
    ),
    ".projection.qkv": "QkvProjection",
}
__getattr__, __dir__ = imported_at_use(globals(), _NAMES)
