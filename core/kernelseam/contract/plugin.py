"""What a plugin registers."""

from __future__ import annotations

from kernelseam.contract.arrays import Runtime
from kernelseam.contract.launches import Composition
from kernelseam.contract.plans import Implementation
from kernelseam.contract.toolchain import Toolchain
from kernelseam.frozen import dataclass


@dataclass(frozen=True)
class PluginInfo:
    """A plugin's metadata, available without importing a vendor's runtime."""

    name: str
    version: str
    contract_version: int
    summary: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables of its own, each with its meaning, for ``kernelseam doctor``."""


@dataclass(frozen=True)
class Backend:
    """A vendor's backend. With a ``toolchain`` it has all shared kernels."""

    name: str
    runtime: Runtime
    toolchain: Toolchain | None = None
    implementations: tuple[Implementation, ...] = ()
    kernels: tuple[Composition, ...] = ()
    """Definitions of kernels that the plugin owns, and compositions of kernels; compiled by
    ``toolchain``."""
    priority: int = 0
    """Where no device is named, the backend with devices and the highest priority is the
    default."""
    jax_platform: str = ""
    """JAX's name of the platform whose buffers and streams the runtime launches on; "" for none."""
