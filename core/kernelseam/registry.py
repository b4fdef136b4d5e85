"""The registry of backends and implementations, each with the plugin that owns it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from kernelseam.contract import Backend, Composition, Implementation
from kernelseam.contract_values import check_implementation, validated_backend
from kernelseam.errors import PluginError

KernelFactory = Callable[[Backend], Iterable[Implementation]]
"""The implementations of a backend's kernels: the shared ones, then its own in their order."""


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
    added_kernels: list[tuple[str, Composition]] = field(default_factory=list)
    """Kernels for backends of any plugin: see ``add_kernel``."""

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

    def add_kernel(self, backend: str, kernel: Composition) -> None:
        """Register a kernel definition, or a composition of kernels, for a backend of another
        plugin: that backend's toolchain compiles it, once all plugins are loaded.

        On archs whose cost model was fitted to measured times, its predicted time is not compared
        with those of the backend's implementations: it is chosen where it is named, where tuning
        found it the fastest, or where no other takes the problem. ``kernelseam doctor`` reports a
        backend that is not installed.
        """
        self.added_kernels.append((backend, kernel))

    def adopt(self, name: str, kernels: Sequence[Composition], plugin: str) -> None:
        """Add a plugin's kernels to a backend. Raises PluginError where there is none of the name,
        where it compiles nothing, or where a name is taken."""
        backend = self.backends.get(name)
        if backend is None or backend.toolchain is None:
            lacks = "is not installed" if backend is None else "has no toolchain"
            raise PluginError(f"it adds kernels to backend {name!r}, which {lacks}")
        extended = replace(backend, kernels=(*backend.kernels, *kernels))
        validated_backend(extended)
        scratch = Registry(implementations=list(self.kernels_of(extended))[-len(kernels) :])
        self.merge(scratch, plugin)
        self.backends[name] = extended

    def is_foreign(self, implementation: Implementation) -> bool:
        """Whether another plugin than its backend's registered it."""
        backend, operation = implementation.backend, implementation.operation
        owner = self.owners.get((backend,))
        return owner != self.owners.get((backend, operation, implementation.name), owner)

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
