"""The core's own plugin: the backend "numpy", with the lowest priority, and implementations of the
kernels that each toolchain compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from kernelseam import reference
from kernelseam._version import __version__
from kernelseam.contract import (
    CONTRACT_VERSION,
    Backend,
    Cost,
    Device,
    Implementation,
    PlanParts,
    PluginInfo,
)
from kernelseam.forking import cached_property
from kernelseam.hookspecs import hookimpl
from kernelseam.reference.runtime import HostRuntime
from kernelseam.registry import Registry


class NumpyAtUse:
    """NumPy's implementation of an operation, imported when it is first asked: a process that calls
    a GPU's kernels needs none of them."""

    name, backend = "numpy", "numpy"

    def __init__(self, operation: str, make: Callable[[], Implementation]) -> None:
        self.operation, self._make = operation, make

    @cached_property
    def _made(self) -> Implementation:
        return self._make()

    def supports(self, problem: Any, device: Device) -> str | None:
        return self._made.supports(problem, device)

    def cost(self, problem: Any, device: Device) -> Cost:
        return self._made.cost(problem, device)

    def build(self, problem: Any, device: Device) -> PlanParts:
        return self._made.build(problem, device)


def _projection(operation: str) -> Implementation:
    return next(p for p in reference.PROJECTIONS if p.operation == operation)


_PROJECTIONS = (
    "qkv_projection",
    "output_projection",
    "qkv_projection_bwd",
    "output_projection_bwd",
)
_IMPLEMENTATIONS = (
    NumpyAtUse("gemm", lambda: reference.NumpyGemm()),
    NumpyAtUse("grouped_gemm", lambda: reference.NumpyGroupedGemm()),
    NumpyAtUse("grouped_gemm_pointers", lambda: reference.NumpyGroupedGemmPointers()),
    NumpyAtUse("attention", lambda: reference.NumpyAttention()),
    NumpyAtUse("merge_states", lambda: reference.NumpyMerge()),
    NumpyAtUse("paged_cache", lambda: reference.NumpyPagedCache()),
    NumpyAtUse("attention_bwd", lambda: reference.NumpyAttentionBwd()),
    *(NumpyAtUse(name, partial(_projection, name)) for name in _PROJECTIONS),
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
