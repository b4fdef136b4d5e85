"""What the plugins register: backends and implementations, each with its owner."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kernelseam.contract import Backend, Implementation
from kernelseam.contract_values import held_backend, hold_implementation
from kernelseam.errors import PluginError

KernelsOf = Callable[[Backend], Iterable[Implementation]]


def _none(backend: Backend) -> Iterable[Implementation]:
    return ()


@dataclass
class Registry:
    """What the plugins registered. A plugin fills in a scratch registry, merged only when it
    succeeds."""

    backends: dict[str, Backend] = field(default_factory=dict)
    implementations: list[Implementation] = field(default_factory=list)
    owners: dict[tuple[str, ...], str] = field(default_factory=dict)
    """Which plugin a backend (name,) and an implementation (backend, operation, name) came from."""
    kernels_of: KernelsOf = _none
    """Implementations by the kernels that a backend's toolchain compiles, shared ones and its own:
    given by discovery, and none without it."""

    def add_backend(self, backend: Backend) -> None:
        """Register devices, toolchain and implementations; shared kernels follow from the
        toolchain. Raises PluginError for a field that is not as the contract has it."""
        held_backend(backend)
        if backend.name in self.backends:
            raise PluginError(f"backend {backend.name!r} is registered twice")
        self.backends[backend.name] = backend
        if backend.kernels and backend.toolchain is None:
            raise PluginError(
                f"backend {backend.name!r} has kernels and no toolchain that compiles them"
            )
        self.implementations.extend(self.kernels_of(backend))
        self.implementations.extend(backend.implementations)

    def add_implementation(self, implementation: Implementation) -> None:
        """Register one more way to compute, for a backend of one's own or of another plugin. Raises
        PluginError."""
        hold_implementation(implementation)
        self.implementations.append(implementation)

    def merge(self, other: Registry, plugin: str) -> None:
        """Take over what a plugin registered, all of it or, where a name is taken, nothing. Raises
        PluginError."""
        owners: dict[tuple[str, ...], str] = {}
        for backend in other.backends.values():  # it may have been filled in by hand
            held_backend(backend)
        for name in other.backends:
            if name in self.backends:
                owner = self.owners[name,]
                raise PluginError(f"backend {name!r} is already registered by plugin {owner!r}")
            owners[name,] = plugin
        for i in other.implementations:
            hold_implementation(i)
            key = (i.backend, i.operation, i.name)
            if first := self.owners.get(key) or owners.get(key):
                what = f"implementation {i.name!r} of {i.operation} on {i.backend}"
                raise PluginError(f"{what} is already registered by plugin {first!r}")
            owners[key] = plugin
        self.backends.update(other.backends)
        self.implementations.extend(other.implementations)
        self.owners.update(owners)
