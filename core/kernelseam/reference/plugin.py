"""The reference's hooks: the backend "numpy", there on every machine and first choice on none with
a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kernelseam._version import __version__
from kernelseam.contract import CONTRACT_VERSION, Backend, PluginInfo
from kernelseam.hookspecs import hookimpl
from kernelseam.plugins import Registry
from kernelseam.reference.attention import NumpyAttention
from kernelseam.reference.attention_bwd import NumpyAttentionBwd
from kernelseam.reference.gemm import NumpyGemm
from kernelseam.reference.merge import NumpyMerge
from kernelseam.reference.projection import PROJECTIONS
from kernelseam.reference.runtime import HostRuntime

_IMPLEMENTATIONS = (NumpyGemm(), NumpyAttention(), NumpyMerge(), NumpyAttentionBwd(), *PROJECTIONS)


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
