"""The core's own plugin: the backend "numpy", with the lowest priority, and implementations of the
kernels that each toolchain compiles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from kernelseam._version import __version__
from kernelseam.contract import CONTRACT_VERSION, Backend, Implementation, PluginInfo
from kernelseam.hookspecs import hookimpl
from kernelseam.reference.attention import NumpyAttention
from kernelseam.reference.attention_bwd import NumpyAttentionBwd
from kernelseam.reference.cache import NumpyPagedCache
from kernelseam.reference.gemm import NumpyGemm
from kernelseam.reference.grouped_gemm import NumpyGroupedGemm, NumpyGroupedGemmPointers
from kernelseam.reference.merge import NumpyMerge
from kernelseam.reference.projection import PROJECTIONS
from kernelseam.reference.runtime import HostRuntime
from kernelseam.registry import Registry

_IMPLEMENTATIONS = (
    NumpyGemm(),
    NumpyGroupedGemm(),
    NumpyGroupedGemmPointers(),
    NumpyAttention(),
    NumpyMerge(),
    NumpyPagedCache(),
    NumpyAttentionBwd(),
    *PROJECTIONS,
)


@hookimpl
def kernelseam_info() -> PluginInfo:
    return PluginInfo(
        "reference", __version__, CONTRACT_VERSION, "NumPy on the host, in blocks over BLAS"
    )


@hookimpl
def kernelseam_register(registry: Registry) -> None:
    registry.add_backend(
        Backend("numpy", HostRuntime(), implementations=_IMPLEMENTATIONS, priority=-100)
    )


@hookimpl
def kernelseam_doctor() -> Mapping[str, Any]:
    config: Any = np.show_config(mode="dicts")  # type: ignore[call-overload,unused-ignore]
    blas = config.get("Build Dependencies", {}).get("blas", {})
    return {
        "numpy": np.__version__,
        "blas": f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip(),
    }


def kernels_of(backend: Backend) -> Iterable[Implementation]:
    """The shared kernels and a backend's own, on its toolchain; none where it has no toolchain."""
    if backend.toolchain is None:
        return ()
    # imported only where a backend has a toolchain, to keep imports fast on the host
    from kernelseam.kernels import KernelImplementation, shared_implementations

    own = (KernelImplementation(k, backend.toolchain) for k in backend.kernels)
    return (*shared_implementations(backend.toolchain), *own)
