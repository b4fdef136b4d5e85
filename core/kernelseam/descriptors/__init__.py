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

_HOMES = {
    "AttentionBwd": ".attention.backward",
    "AttentionBwdProblem": ".attention.backward_problem",
    "AttentionBwdSpec": ".attention.backward_problem",
    "Attention": ".attention.forward",
    "MergeStates": ".attention.merge",
    "MergeProblem": ".attention.merge_problem",
    "MergeSpec": ".attention.merge_problem",
    "AttentionPointers": ".attention.pointers",
    "AttentionProblem": ".attention.problem",
    "AttentionSpec": ".attention.problem",
    "PagedCache": ".cache.cache",
    "PagedCacheProblem": ".cache.problem",
    "PagedCacheSpec": ".cache.problem",
    "GroupedGemm": ".gemm.grouped",
    "GroupedGemmPointers": ".gemm.grouped_pointers",
    "GroupedGemmPointersProblem": ".gemm.grouped_pointers_problem",
    "GroupedGemmPointersSpec": ".gemm.grouped_pointers_problem",
    "GroupedGemmProblem": ".gemm.grouped_problem",
    "GroupedGemmSpec": ".gemm.grouped_problem",
    "BatchedGemmPointers": ".gemm.pointers",
    "GemmProblem": ".gemm.problem",
    "GemmSpec": ".gemm.problem",
    "BatchedGemmStrided": ".gemm.strided",
    "OutputProjectionBwd": ".projection.backward",
    "QkvProjectionBwd": ".projection.backward",
    "OutputProjectionBwdProblem": ".projection.backward_problem",
    "OutputProjectionBwdSpec": ".projection.backward_problem",
    "QkvProjectionBwdProblem": ".projection.backward_problem",
    "QkvProjectionBwdSpec": ".projection.backward_problem",
    "OutputProjection": ".projection.output",
    "OutputProjectionProblem": ".projection.problem",
    "OutputProjectionSpec": ".projection.problem",
    "QkvProjectionProblem": ".projection.problem",
    "QkvProjectionSpec": ".projection.problem",
    "QkvProjection": ".projection.qkv",
}
__getattr__, __dir__ = imported_at_use(globals(), _HOMES)
