"""The NumPy implementation: in blocks, with BLAS inside. It enters through the same hooks as every
vendor. Each operation's is imported at its first use."""

from typing import TYPE_CHECKING

from kernelseam.lazy import imported_at_use

if TYPE_CHECKING:
    from kernelseam.reference.attention import NumpyAttention
    from kernelseam.reference.attention_bwd import NumpyAttentionBwd
    from kernelseam.reference.cache import NumpyPagedCache
    from kernelseam.reference.gemm import NumpyGemm
    from kernelseam.reference.grouped_gemm import NumpyGroupedGemm, NumpyGroupedGemmPointers
    from kernelseam.reference.merge import NumpyMerge
    from kernelseam.reference.projection import PROJECTIONS

__all__ = [
    "PROJECTIONS",
    "NumpyAttention",
    "NumpyAttentionBwd",
    "NumpyGemm",
    "NumpyGroupedGemm",
    "NumpyGroupedGemmPointers",
    "NumpyMerge",
    "NumpyPagedCache",
]

_NAMES = {
    ".attention": "NumpyAttention",
    ".attention_bwd": "NumpyAttentionBwd",
    ".cache": "NumpyPagedCache",
    ".gemm": "NumpyGemm",
    ".grouped_gemm": "NumpyGroupedGemm NumpyGroupedGemmPointers",
    ".merge": "NumpyMerge",
    ".projection": "PROJECTIONS",
}
__getattr__, __dir__ = imported_at_use(globals(), _NAMES)
