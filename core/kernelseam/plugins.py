"""Discovery: every entry point of the group is tried on its own, and a broken one harms nobody."""

from __future__ import annotations

import logging
import math
import os
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import pluggy

from kernelseam import hookspecs
from kernelseam.deadline import Hung, probe_seconds, within
from kernelseam.contract import CONTRACT_VERSION, Backend, Device, Implementation, PluginInfo
from kernelseam.errors import PluginError, UnknownName

GROUP = "kernelseam"
_log = logging.getLogger("kernelseam")


@dataclass(frozen=True)
class Failure:
    """A plugin that was kept out, and why."""

    plugin: str
    stage: str
    """"import", "kernelseam_info", "contract", "kernelseam_register", "kernelseam_doctor", "devices" or "archs"; of an
    implementation "supports" (its cost included), "build", "call" or "numbers"."""
    message: str
    traceback: str


@dataclass
class Registry:
    """What the plugins registered. A plugin fills in a scratch registry, merged only when it succeeds."""

    backends: dict[str, Backend] = field(default_factory=dict)
    implementations: list[Implementation] = field(default_factory=list)
    owners: dict[tuple[str, ...], str] = field(default_factory=dict)
    """Which plugin a backend (name,) and an implementation (backend, operation, name) came from."""

    def add_backend(self, backend: Backend) -> None:
        """Register devices, toolchain and implementations; shared kernels follow from the toolchain."""
        if backend.name in self.backends:
            raise PluginError(f"backend {backend.name!r} is registered twice")
        self.backends[backend.name] = backend
        if backend.toolchain is not None:
            from kernelseam.kernels import KernelImplementation, shared_implementations

            self.implementations.extend(shared_implementations(backend.toolchain))
            self.implementations.extend(KernelImplementation(k, backend.toolchain) for k in backend.kernels)
        elif backend.kernels:
            raise PluginError(f"backend {backend.name!r} has kernels and no toolchain that compiles them")
        self.implementations.extend(backend.implementations)

    def add_implementation(self, implementation: Implementation) -> None:
        """Register one more way to compute, for a backend of one's own or of another plugin."""
        self.implementations.append(implementation)

    def merge(self, other: Registry, plugin: str) -> None:
        """Take over what a plugin registered, all of it or, where a name is taken, nothing."""
        owners: dict[tuple[str, ...], str] = {}
        for name in other.backends:
            if name in self.backends:
                owner = self.owners[name,]
                raise PluginError(f"backend {name!r} is already registered by plugin {owner!r}")
            owners[name,] = plugin
        for i in other.implementations:
            key = (i.backend, i.operation, i.name)
            if first := self.owners.get(key) or owners.get(key):
                what = f"implementation {i.name!r} of {i.operation} on {i.backend}"
                raise PluginError(f"{what} is already registered by plugin {first!r}")
            owners[key] = plugin
        self.backends.update(other.backends)
        self.implementations.extend(other.implementations)
        self.owners.update(owners)


@dataclass(frozen=True)
class Plugins:
    """The outcome of discovery."""

    registry: Registry
    loaded: Mapping[str, PluginInfo]
    modules: Mapping[str, object]
    failures: tuple[Failure, ...]
    seconds: float = math.inf
    """The time limit of a plugin's code where it runs for the first time."""
    _probed: dict[str, Hung | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def backend(self, name: str) -> Backend:
        """The backend of that name; raises UnknownName with those there are."""
        try:
            return self.registry.backends[name]
        except KeyError:
            raise UnknownName(
                "backend", name or "''", f"must be one of {', '.join(sorted(self.registry.backends))}",
                f"Install kernelseam[{name}], or see `kernelseam doctor` for a plugin that was kept out",
            ) from None

    def probe(self, backend: Backend) -> None:
        """Have a backend list its devices for the first time, within the time limit. Raises Hung, from then on at once,
        where it does not come back, and whatever it raises itself."""
        if backend.name not in self._probed:
            what = f"listing the devices of backend {backend.name}"
            try:
                within(self.seconds, what, backend.runtime.devices)
                self._probed[backend.name] = None
            except Hung as e:
                self._probed[backend.name] = Hung(str(e), e.stack)
        if hung := self._probed[backend.name]:
            raise Hung(str(hung), hung.stack)  # a new one: the first would keep its caller's frames

    def devices_of(self, backend: Backend) -> Sequence[Device]:
        """The backend's devices; raises as ``probe`` does."""
        self.probe(backend)
        return backend.runtime.devices()

    def devices(self) -> list[Device]:
        """Every device of every backend, the host last. A backend that cannot list its own has none."""
        found: list[Device] = []
        for b in sorted(self.registry.backends.values(), key=lambda b: -b.priority):
            try:
                found.extend(self.devices_of(b))
            except Exception:
                _log.warning("backend %s does not list its devices", b.name, exc_info=True)
        return found

    def doctor(self) -> dict[str, Any]:
        """Each plugin's own report; one that raises or hangs is reported in its place."""
        report: dict[str, Any] = {}
        for name, module in self.modules.items():
            hook = getattr(module, "kernelseam_doctor", None)
            if hook is None:
                continue
            try:
                report[name] = dict(within(self.seconds, "kernelseam_doctor", hook))
            except (Exception, SystemExit) as e:
                report[name] = failure(name, "kernelseam_doctor", e)
        return report


def failure(name: str, stage: str, error: BaseException) -> Failure:
    """What an exception of a plugin's code says."""
    text = "".join(traceback.format_exception(error))
    return Failure(name, stage, f"{type(error).__name__}: {error}", text)


def _info(module: object, manager: pluggy.PluginManager, name: str) -> PluginInfo:
    info = manager.subset_hook_caller("kernelseam_info", _others(manager, module))()
    if len(info) != 1 or not isinstance(info[0], PluginInfo):
        raise PluginError(f"kernelseam_info of {name!r} must return one PluginInfo, got {info!r}")
    result: PluginInfo = info[0]
    return result


def _others(manager: pluggy.PluginManager, module: object) -> list[object]:
    return [p for p in manager.get_plugins() if p is not module]


def discover(entry_points: Iterable[metadata.EntryPoint] | None = None, only: str | None = None) -> Plugins:
    """Load the built-in reference and every entry point of the group.

    ``only`` (default: the variable KERNELSEAM_PLUGINS) is a comma-separated list of entry-point names;
    the reference is always there. Importing a plugin and each of its hooks run under the time limit of
    KERNELSEAM_PROBE_SECONDS; whatever fails there is among the result's failures. Raises InvalidValue for a bad limit.
    """
    seconds = probe_seconds()
    only = os.environ.get("KERNELSEAM_PLUGINS") if only is None else only
    wanted = None if only is None else {n.strip() for n in only.split(",") if n.strip()}
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    registry, loaded, modules, failures = Registry(), {}, {}, []
    places: dict[str, object] = {}

    from kernelseam.reference import plugin as reference

    found: list[tuple[str, object]] = [("reference", reference)]
    for entry in metadata.entry_points(group=GROUP) if entry_points is None else entry_points:
        if wanted is None or entry.name in wanted:
            found.append((entry.name, entry))
    for name in sorted((wanted or set()) - {name for name, _ in found}):
        missing = PluginError(f"KERNELSEAM_PLUGINS names {name!r}, but no entry point of that name is installed")
        failures.append(failure(name, "import", missing))
    for name, source in found:
        stage = "import"
        module: object = source
        try:
            if name in loaded:
                raise PluginError(
                    f"two plugins are named {name!r}: {_place(places[name])} is loaded, {_place(source)} is kept out"
                )
            if isinstance(source, metadata.EntryPoint):
                module = within(seconds, "its import", source.load)
            stage = "kernelseam_info"
            manager.register(module, name=name)
            manager.check_pending()
            info = within(seconds, stage, _info, module, manager, name)
            stage = "contract"
            if info.contract_version != CONTRACT_VERSION:
                raise PluginError(
                    f"plugin {name!r} speaks contract version {info.contract_version}, this core {CONTRACT_VERSION}: "
                    f"install versions of both that agree"
                )
            stage = "kernelseam_register"
            scratch = Registry()
            register = manager.subset_hook_caller("kernelseam_register", _others(manager, module))
            within(seconds, stage, register, registry=scratch)
            registry.merge(scratch, name)
        except (Exception, SystemExit) as e:
            failures.append(failure(name, stage, e))
            if manager.get_plugin(name) is module:
                manager.unregister(module)
            continue
        loaded[name], modules[name], places[name] = info, module, source
    return Plugins(registry, loaded, modules, tuple(failures), seconds)


def _place(source: object) -> str:
    """Where a plugin's code is, for people."""
    if not isinstance(source, metadata.EntryPoint):
        return "the core's own"
    return source.value + (f" of {source.dist.name} {source.dist.version}" if source.dist else "")


_lock = threading.Lock()
_plugins: Plugins | None = None


def plugins() -> Plugins:
    """The process's plugins, discovered at first use."""
    global _plugins
    if _plugins is None:
        with _lock:
            if _plugins is None:
                _plugins = discover()
    return _plugins


def reset() -> None:
    """Forget what was discovered; the next use looks again."""
    global _plugins
    with _lock:
        _plugins = None
    from kernelseam import planning

    planning.forget()
