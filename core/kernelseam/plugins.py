"""Discovery: every entry point of the group is tried on its own, and a broken one harms nobody."""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from types import ModuleType
from typing import Any

import pluggy

from kernelseam import hookspecs
from kernelseam.contract import CONTRACT_VERSION, Backend, Device, Implementation, PluginInfo
from kernelseam.errors import PluginError, UnknownName

GROUP = "kernelseam"
_log = logging.getLogger("kernelseam")


@dataclass(frozen=True)
class Failure:
    """A plugin that was kept out, and why."""

    plugin: str
    stage: str
    """"import", "kernelseam_info", "contract", "kernelseam_register" or "kernelseam_doctor"."""
    message: str
    traceback: str


@dataclass
class Registry:
    """What the plugins registered. A plugin fills in a scratch registry, merged only when it succeeds."""

    backends: dict[str, Backend] = field(default_factory=dict)
    implementations: list[Implementation] = field(default_factory=list)

    def add_backend(self, backend: Backend) -> None:
        """Register devices, toolchain and implementations; shared kernels follow from the toolchain."""
        if backend.name in self.backends:
            raise PluginError(f"backend {backend.name!r} is registered twice")
        self.backends[backend.name] = backend
        if backend.toolchain is not None:
            from kernelseam.kernels import shared_implementations

            self.implementations.extend(shared_implementations(backend.toolchain))
        self.implementations.extend(backend.implementations)

    def add_implementation(self, implementation: Implementation) -> None:
        """Register one more way to compute, for a backend of one's own or of another plugin."""
        self.implementations.append(implementation)

    def merge(self, other: Registry) -> None:
        for name in other.backends:
            if name in self.backends:
                raise PluginError(f"backend {name!r} is already registered by another plugin")
        names = {(i.backend, i.operation, i.name) for i in self.implementations}
        for i in other.implementations:
            if (i.backend, i.operation, i.name) in names:
                raise PluginError(f"implementation {i.name!r} of {i.operation} on {i.backend} is already registered")
            names.add((i.backend, i.operation, i.name))
        self.backends.update(other.backends)
        self.implementations.extend(other.implementations)


@dataclass(frozen=True)
class Plugins:
    """The outcome of discovery."""

    registry: Registry
    loaded: Mapping[str, PluginInfo]
    modules: Mapping[str, object]
    failures: tuple[Failure, ...]

    def backend(self, name: str) -> Backend:
        """The backend of that name; raises UnknownName with those there are."""
        try:
            return self.registry.backends[name]
        except KeyError:
            raise UnknownName(
                "backend", name, f"must be one of {', '.join(sorted(self.registry.backends))}",
                f"Install kernelseam[{name}], or see `kernelseam doctor` for a plugin that was kept out",
            ) from None

    def devices(self) -> list[Device]:
        """Every device of every backend, the host last. A backend that cannot list its own has none."""
        found: list[Device] = []
        for b in sorted(self.registry.backends.values(), key=lambda b: -b.priority):
            try:
                found.extend(b.runtime.devices())
            except Exception:
                _log.warning("backend %s does not list its devices", b.name, exc_info=True)
        return found

    def doctor(self) -> dict[str, Any]:
        """Each plugin's own report; one that raises is reported in its place."""
        report: dict[str, Any] = {}
        for name, module in self.modules.items():
            hook = getattr(module, "kernelseam_doctor", None)
            if hook is None:
                continue
            try:
                report[name] = dict(hook())
            except (Exception, SystemExit) as e:
                report[name] = _failure(name, "kernelseam_doctor", e)
        return report


def _failure(name: str, stage: str, error: BaseException) -> Failure:
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
    the reference is always there.
    """
    only = os.environ.get("KERNELSEAM_PLUGINS") if only is None else only
    wanted = None if only is None else {n.strip() for n in only.split(",") if n.strip()}
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    registry, loaded, modules, failures = Registry(), {}, {}, []

    from kernelseam.reference import plugin as reference

    found: list[tuple[str, object]] = [("reference", reference)]
    for entry in metadata.entry_points(group=GROUP) if entry_points is None else entry_points:
        if wanted is None or entry.name in wanted:
            found.append((entry.name, entry))
    for name in sorted((wanted or set()) - {name for name, _ in found}):
        missing = PluginError(f"KERNELSEAM_PLUGINS names {name!r}, but no entry point of that name is installed")
        failures.append(_failure(name, "import", missing))
    for name, source in found:
        stage = "import"
        module: object = source
        try:
            if not isinstance(source, ModuleType):
                module = source.load()  # type: ignore[attr-defined]
            if name in loaded:
                raise PluginError(f"two plugins are named {name!r}")
            stage = "kernelseam_info"
            manager.register(module, name=name)
            manager.check_pending()
            info = _info(module, manager, name)
            stage = "contract"
            if info.contract_version != CONTRACT_VERSION:
                raise PluginError(
                    f"plugin {name!r} speaks contract version {info.contract_version}, this core {CONTRACT_VERSION}: "
                    f"install versions of both that agree"
                )
            stage = "kernelseam_register"
            scratch = Registry()
            manager.subset_hook_caller("kernelseam_register", _others(manager, module))(registry=scratch)
            registry.merge(scratch)
        except (Exception, SystemExit) as e:
            failures.append(_failure(name, stage, e))
            if manager.get_plugin(name) is module:
                manager.unregister(module)
            continue
        loaded[name], modules[name] = info, module
    return Plugins(registry, loaded, modules, tuple(failures))


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
