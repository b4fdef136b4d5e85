"""kernelseam: one seam between host code and the kernels of whatever device is there.

Arrays or a filled-in descriptor go in; a plugin for the device computes. Importing this loads no
vendor's runtime and looks for no device: both happen at the first use.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from kernelseam import errors, known_problems, torch_dispatch, verifier
from kernelseam._version import __version__
from kernelseam.lazy import imported_at_use

if TYPE_CHECKING:
    from kernelseam.contract import Device, Problem, Runtime
    from kernelseam.descriptors import (
        Attention,
        AttentionBwd,
        AttentionPointers,
        BatchedGemmPointers,
        BatchedGemmStrided,
        GroupedGemm,
        GroupedGemmPointers,
        MergeStates,
        OutputProjection,
        OutputProjectionBwd,
        PagedCache,
        QkvProjection,
        QkvProjectionBwd,
    )
    from kernelseam.dispatch import use_backend
    from kernelseam.dtypes import DType
    from kernelseam.expressions.elementwise import where
    from kernelseam.expressions.tree import tree_ancestors, tree_mask
    from kernelseam.known_problems import KnownLaunches
    from kernelseam.launch_trace import trace
    from kernelseam.ops.attention import attention, attention_paged, attention_varlen
    from kernelseam.ops.attention_bwd import attention_bwd
    from kernelseam.ops.block_mask import block_mask
    from kernelseam.ops.cache import append_paged, copy_pages, gather_paged
    from kernelseam.ops.gemm import bmm, matmul2d
    from kernelseam.ops.gemm_bwd import bmm_bwd, matmul2d_bwd
    from kernelseam.ops.grouped_gemm import grouped_mm
    from kernelseam.ops.grouped_list import grouped_mm_list
    from kernelseam.ops.merge import merge_states
    from kernelseam.ops.projection import fused_output_projection_residual, fused_qkv_projection
    from kernelseam.ops.projection_bwd import (
        fused_output_projection_residual_bwd,
        fused_qkv_projection_bwd,
    )
    from kernelseam.oracle.verification import Verification
    from kernelseam.planning import Call, Plan, plan

__all__ = [
    "Attention",
    "AttentionBwd",
    "AttentionPointers",
    "BatchedGemmPointers",
    "BatchedGemmStrided",
    "Call",
    "DType",
    "GroupedGemm",
    "GroupedGemmPointers",
    "MergeStates",
    "OutputProjection",
    "OutputProjectionBwd",
    "PagedCache",
    "Plan",
    "QkvProjection",
    "QkvProjectionBwd",
    "__version__",
    "append_paged",
    "attention",
    "attention_bwd",
    "attention_paged",
    "attention_varlen",
    "block_mask",
    "bmm",
    "bmm_bwd",
    "copy_pages",
    "devices",
    "errors",
    "fused_output_projection_residual",
    "fused_output_projection_residual_bwd",
    "fused_qkv_projection",
    "fused_qkv_projection_bwd",
    "gather_paged",
    "grouped_mm",
    "grouped_mm_list",
    "matmul2d",
    "matmul2d_bwd",
    "merge_states",
    "plan",
    "trace",
    "use_backend",
    "tree_ancestors",
    "tree_mask",
    "where",
]

_NAMES = {
    ".descriptors": (
        "Attention AttentionBwd AttentionPointers BatchedGemmPointers BatchedGemmStrided "
        "GroupedGemm GroupedGemmPointers MergeStates OutputProjection OutputProjectionBwd "
        "PagedCache QkvProjection QkvProjectionBwd"
    ),
    ".dispatch": "use_backend",
    ".dtypes": "DType",
    ".expressions.elementwise": "where",
    ".expressions.tree": "tree_ancestors tree_mask",
    ".launch_trace": "trace",
    ".ops.attention": "attention attention_paged attention_varlen",
    ".ops.attention_bwd": "attention_bwd",
    ".ops.block_mask": "block_mask",
    ".ops.cache": "append_paged copy_pages gather_paged",
    ".ops.gemm": "bmm matmul2d",
    ".ops.gemm_bwd": "bmm_bwd matmul2d_bwd",
    ".ops.grouped_gemm": "grouped_mm",
    ".ops.grouped_list": "grouped_mm_list",
    ".ops.merge": "merge_states",
    ".ops.projection": "fused_output_projection_residual fused_qkv_projection",
    ".ops.projection_bwd": "fused_output_projection_residual_bwd fused_qkv_projection_bwd",
    ".planning": "Call Plan plan",
}


def _torch_operators() -> Any:
    from kernelseam.interop.torch_library.handover import OPERATORS

    return OPERATORS


torch_dispatch.register(_torch_operators)
logging.getLogger(__name__).addHandler(logging.NullHandler())


__getattr__, __dir__ = imported_at_use(globals(), _NAMES)


def devices() -> list[Device]:
    """Every device of every backend that is installed, the host last."""
    from kernelseam.plugins import plugins

    return plugins().devices()


class _Oracle:
    """The oracle as the verifier of calls, imported at its first use."""

    def require_supported(self, problem: Problem) -> None:
        from kernelseam.oracle.verification import verifier_of

        verifier_of(problem)

    def verification(self, plan: Plan, pointers: dict[str, int], runtime: Runtime) -> Verification:
        from kernelseam.oracle.verification import Verification

        return Verification(plan, pointers, runtime)


class _KnownProblems:
    """Problems of kernels, which are imported where a device has some."""

    def find(
        self, problem: Problem, device: Device, implementation: str | None
    ) -> KnownLaunches | None:
        if device.is_host:
            return None
        from kernelseam.kernels.known import KnownProblems

        return KnownProblems().find(problem, device, implementation)

    def learn(self, problem: Problem, device: Device, implementation: str | None) -> None:
        if not device.is_host:
            from kernelseam.kernels.known import KnownProblems

            KnownProblems().learn(problem, device, implementation)


verifier.register(_Oracle())
known_problems.register(_KnownProblems())
