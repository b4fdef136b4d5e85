"""The registry of backends and implementations, each with the plugin that owns it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kernelseam.contract import Backend, Implementation
from kernelseam.contract_values import check_implementation, validated_backend
from kernelseam.errors import PluginError

KernelFactory = Callable[[Backend], Iterable[Implementation]]


def _none(backend: Backend) -> Iterable[Implementation]:
    return ()


@dataclass
class Registry:
    """Backends and implementations. A plugin fills in a scratch registry, which is merged only when
    the plugin succeeds."""

    backends: dict[str, Backend] = field(default_factory=dict)
    implementations: list[Implementation] = field(default_factory=list)
    owners: dict[tuple[str, ...], str] = field(default_factory=dict)
    """The plugin of a backend (name,) or an implementation (backend, operation, name)."""
    kernels_of: KernelFactory = _none
    """Makes implementations of the kernels that a backend's toolchain compiles, shared ones and its
    own; set by discovery."""

    def add_backend(self, backend: Backend) -> None:
        """Register devices, toolchain and implementations; shared kernels follow from the
        toolchain. Raises PluginError for a field that violates the contract."""
        validated_backend(backend)
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
        """Register another implementation, for a backend of this or another plugin. Raises
        PluginError."""
        check_implementation(implementation)
        self.implementations.append(implementation)

    def implementations_of(
        self, operation: str, backend: str | None = None
    ) -> tuple[Implementation, ...]:
        """Those of an operation, on one backend or on all, in the order of their registration."""
        return tuple(
            i
            for i in self.implementations
            if i.operation == operation and backend in (None, i.backend)
        )

    def merge(self, other: Registry, plugin: str) -> None:
        """Add everything that a plugin registered, or nothing where a name is taken. Raises
        PluginError."""
        owners: dict[tuple[str, ...], str] = {}
        for backend in other.backends.values():  # it may have been filled in by hand
            validated_backend(backend)
        for name in other.backends:
            if name in self.backends:
                owner = self.owners[name,]
                raise PluginError(f"backend {name!r} is already registered by plugin {owner!r}")
            owners[name,] = plugin
        for i in other.implementations:
            check_implementation(i)
            key = (i.backend, i.operation, i.name)
            if first := self.owners.get(key) or owners.get(key):
                what = f"implementation {i.name!r} of {i.operation} on {i.backend}"
                raise PluginError(f"{what} is already registered by plugin {first!r}")
            owners[key] = plugin
        self.backends.update(other.backends)
        self.implementations.extend(other.implementations)
        self.owners.update(owners)
