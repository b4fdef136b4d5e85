"""Discovery of plugins: each entry point is loaded separately, so that a broken one is left out."""

from __future__ import annotations

import logging
import math
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import field
from importlib import metadata
from typing import Any, TypeVar

import pluggy

from kernelseam import hookspecs, installed
from kernelseam.containment import Contained, error_text, traceback_text
from kernelseam.contract import CONTRACT_VERSION, Backend, Device, PluginInfo
from kernelseam.contract_values import validated, validated_archs, validated_devices
from kernelseam.deadline import PluginTimeout, probe_seconds, run_with_timeout
from kernelseam.errors import CompileError, PluginError, UnknownName
from kernelseam.forking import new_lock
from kernelseam.frozen import dataclass
from kernelseam.registry import KernelFactory, Registry

GROUP = "kernelseam"
BUILT_IN = metadata.EntryPoint("reference", f"{__package__}.builtin", GROUP)
"""The core's own plugin, loaded by its entry point as any other."""
shipped: Sequence[metadata.EntryPoint] | None = None
"""The plugins of a copy of this package that brings them along, which replace those that are
installed; None for others."""
_log = logging.getLogger("kernelseam")
T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """Why a plugin is not used."""

    plugin: str
    stage: str
    """"metadata", "import", "kernelseam_info", "contract", "kernelseam_register",
    "kernelseam_doctor", "devices", "archs" or "compiler"; of an implementation "supports" (its cost
    included), "build", "call" or "numbers"."""
    message: str
    traceback: str


@dataclass(frozen=True)
class Plugins:
    """The result of discovery."""

    registry: Registry
    loaded: Mapping[str, PluginInfo]
    modules: Mapping[str, object]
    failures: tuple[Failure, ...]
    seconds: float = math.inf
    """The time limit of a plugin's first import, of its hooks and of its first device listing."""
    _listed: dict[str, tuple[Device, ...] | PluginTimeout] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    caches: dict[type, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Caches by class: see ``cache_of``."""

    def cache_of(self, kind: type[T]) -> T:
        """The cache of a class for these plugins, made at first use and dropped by ``forget``."""
        cache: T | None = self.caches.get(kind)
        return self.caches.setdefault(kind, kind()) if cache is None else cache

    def forget(self) -> None:
        """Clear all caches: plans, and launches that functions on arrays have bound."""
        self.caches.clear()

    def backend(self, name: str) -> Backend:
        """The backend of that name. Raises UnknownName, which lists the installed ones."""
        try:
            return self.registry.backends[name]
        except KeyError:
            raise UnknownName(
                "backend",
                name,
                f"must be one of {', '.join(sorted(self.registry.backends))}",
                f"{_remedy(name)}, or see `kernelseam doctor` for a plugin that was kept out",
            ) from None

    def devices_of(self, backend: Backend) -> Sequence[Device]:
        """The backend's devices, listed once, within the time limit. Raises PluginTimeout where the
        listing hangs (later calls raise it at once), PluginError for values that are no devices,
        and what the listing raises."""
        listed = self._listed.get(backend.name)
        if listed is None:
            try:
                listed = run_with_timeout(
                    self.seconds,
                    f"listing the devices of backend {backend.name}",
                    _devices,
                    backend,
                )
            except PluginTimeout as e:
                listed = PluginTimeout(str(e), e.stack)
            self._listed[backend.name] = listed
        if isinstance(listed, PluginTimeout):
            # a new exception: the first would keep its caller's frames alive
            raise PluginTimeout(str(listed), listed.stack)
        return listed

    def devices(self) -> list[Device]:
        """All devices of all backends, the host last. A backend whose listing fails has none."""
        devices: list[Device] = []
        for b in sorted(self.registry.backends.values(), key=lambda b: -b.priority):
            try:
                devices.extend(self.devices_of(b))
            except Exception:
                _log.warning("backend %s does not list its devices", b.name, exc_info=True)
        return devices

    def archs_of(self, backend: Backend) -> tuple[str, ...]:
        """The archs that the backend's toolchain compiles for; () without a toolchain. Raises what
        the toolchain raises, and PluginError for values that are no archs."""
        if backend.toolchain is None:
            return ()
        with Contained(f"listing the archs of backend {backend.name}"):
            return validated_archs(backend.name, backend.toolchain.archs)

    def compiler_of(self, backend: Backend) -> str:
        """What the backend's toolchain compiles with; "" without one, or where that is missing.
        Raises what the toolchain raises."""
        if backend.toolchain is None:
            return ""
        with Contained(f"asking for the compiler of backend {backend.name}"):
            try:
                return str(backend.toolchain.compiler())
            except CompileError:
                return ""

    def doctor(self) -> dict[str, Any]:
        """Each plugin's report, or a Failure where it raises or hangs."""
        report: dict[str, Any] = {}
        for name, module in self.modules.items():
            try:
                report[name] = run_with_timeout(self.seconds, "kernelseam_doctor", _report, module)
            except Exception as e:
                report[name] = failure(name, "kernelseam_doctor", e)
        return report


def _remedy(backend: str) -> str:
    """How to have a backend that is not here: by the extra of its name, where there is one."""
    try:
        required = metadata.requires("kernelseam") or []
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        required = []
    extra = f"extra == '{backend}'"
    if any(r.startswith("kernelseam-") and extra in r.replace('"', "'") for r in required):
        return f"Install kernelseam[{backend}]"
    return "Name one of these"


def _devices(backend: Backend) -> tuple[Device, ...]:
    return validated_devices(backend.name, backend.runtime.devices())


def _report(module: object) -> dict[str, Any]:
    """The report of the plugin's ``kernelseam_doctor`` as plain data; {} where it has no such
    hook."""
    hook = getattr(module, "kernelseam_doctor", dict)
    return {str(name): _plain(value) for name, value in dict(hook()).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if value is None or type(value) in (bool, int, float, str) else str(value)


def failure(name: str, stage: str, error: BaseException) -> Failure:
    """The Failure for an exception of a plugin's code."""
    return Failure(name, stage, error_text(error), traceback_text(error))


def _plugin_info(module: object, manager: pluggy.PluginManager, name: str) -> PluginInfo:
    """The plugin's PluginInfo. Registering already runs its code: pluggy reads all its
    attributes."""
    manager.add_hookspecs(hookspecs)
    manager.register(module, name=name)
    manager.check_pending()
    info = manager.hook.kernelseam_info()
    if len(info) != 1:
        raise PluginError(f"kernelseam_info of {name!r} must return one PluginInfo, got {info!r}")
    return validated(f"kernelseam_info of {name!r}", info[0], PluginInfo)


def _register(manager: pluggy.PluginManager, kernels_of: KernelFactory) -> Registry:
    scratch = Registry(kernels_of=kernels_of)
    manager.hook.kernelseam_register(registry=scratch)
    return scratch


def _entry_points(failures: list[Failure]) -> list[metadata.EntryPoint]:
    """All entry points of the group. A distribution with unreadable metadata becomes a Failure; the
    others are used."""
    try:
        installed.forget()
        return installed.entry_points(GROUP)
    except Exception:  # the error does not name the distribution
        entry_points: list[metadata.EntryPoint] = []
    names = set()
    for distribution in metadata.distributions():
        name = "an unnamed distribution"
        try:
            name = distribution.metadata["Name"] or name
            # the first on the path shadows the others
            if (normal := re.sub("[-_.]+", "-", name).lower()) not in names:
                names.add(normal)
                entry_points += distribution.entry_points.select(group=GROUP)
        except Exception as e:
            failures.append(failure(f"{name} in {distribution.locate_file('')}", "metadata", e))
    return entry_points


def discover(
    entry_points: Iterable[metadata.EntryPoint] | None = None, only: str | None = None
) -> Plugins:
    """Load the built-in reference and every entry point of the group.

    ``only`` (default: the variable KERNELSEAM_PLUGINS) is a comma-separated list of entry-point
    names; the reference is always loaded. Importing a plugin and each of its hooks run with the
    time limit KERNELSEAM_PROBE_SECONDS; errors there become the result's failures.
    Raises InvalidValue for a bad limit.
    """
    seconds = probe_seconds()
    only = os.environ.get("KERNELSEAM_PLUGINS") if only is None else only
    wanted = None if only is None else {n.strip() for n in only.split(",") if n.strip()}
    failures: list[Failure] = []
    # An error of the built-in plugin is raised: without the reference the core does not work.
    builtin: Any = BUILT_IN.load()
    origins: dict[str, object] = {BUILT_IN.name: builtin}
    modules: dict[str, object] = {BUILT_IN.name: builtin}
    registry, loaded = (
        Registry(kernels_of=builtin.kernels_of),
        {BUILT_IN.name: builtin.kernelseam_info()},
    )
    scratch = Registry(kernels_of=builtin.kernels_of)
    builtin.kernelseam_register(scratch)
    registry.merge(scratch, BUILT_IN.name)

    entry_points = shipped if entry_points is None else entry_points
    entries = _entry_points(failures) if entry_points is None else entry_points
    selected = [e for e in entries if wanted is None or e.name in wanted]
    for name in sorted((wanted or set()) - {BUILT_IN.name, *(e.name for e in selected)}):
        missing = PluginError(
            f"KERNELSEAM_PLUGINS names {name!r}, but no entry point of that name is installed"
        )
        failures.append(failure(name, "import", missing))
    added: list[tuple[str, Registry]] = []
    for entry in selected:
        name, stage = entry.name, "import"
        # one manager per plugin, so that a plugin cannot affect the others
        manager = pluggy.PluginManager(hookspecs.PROJECT)
        try:
            if name in loaded:
                raise PluginError(
                    f"two plugins are named {name!r}: {_origin(origins[name])} is loaded, "
                    f"{_origin(entry)} is kept out"
                )
            module: object = run_with_timeout(seconds, "its import", entry.load)
            stage = "kernelseam_info"
            info = run_with_timeout(seconds, stage, _plugin_info, module, manager, name)
            stage = "contract"
            if info.contract_version != CONTRACT_VERSION:
                raise PluginError(
                    f"plugin {name!r} has contract version {info.contract_version}, this core "
                    f"{CONTRACT_VERSION}: "
                    f"install matching versions of both"
                )
            stage = "kernelseam_register"
            scratch = run_with_timeout(seconds, stage, _register, manager, registry.kernels_of)
            with Contained(f"the registration of {name!r}"):
                registry.merge(scratch, name)
        except Exception as e:
            failures.append(failure(name, stage, e))
            continue
        loaded[name], modules[name], origins[name] = info, module, entry
        added.append((name, scratch))
    for name, scratch in added:  # to backends of plugins that came later, too
        for backend in dict.fromkeys(b for b, _ in scratch.added_kernels):
            kernels = [k for b, k in scratch.added_kernels if b == backend]
            try:
                with Contained(f"the kernels of {name!r}"):
                    registry.adopt(backend, kernels, name)
            except Exception as e:
                failures.append(failure(name, "kernelseam_register", e))
    return Plugins(registry, loaded, modules, tuple(failures), seconds)


def _origin(source: object) -> str:
    """Where a plugin's code comes from, for messages."""
    if not isinstance(source, metadata.EntryPoint):
        return "the core's own"
    return source.value + (f" of {source.dist.name} {source.dist.version}" if source.dist else "")


_lock = new_lock()
_plugins: Plugins | None = None


class _Discovery(Future[Plugins]):
    """A discovery in its own thread. Ctrl-C ends only the caller's wait; the next caller gets the
    result. In the main thread, an interrupted import could leave an import lock held, and every
    later import of that module waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.process = os.getpid()
        """A forked child has none of its parent's threads, and starts its own discovery."""

    def start(self) -> None:
        threading.Thread(target=self._work, name="kernelseam: discovery", daemon=True).start()

    def _work(self) -> None:
        global _plugins, _running
        _discovering.set(True)
        result, error = None, None
        try:
            result = discover()
        except BaseException as e:
            error = e
        with _lock:
            if _running is self:
                _plugins, _running = result, None
        if result is not None:
            self.set_result(result)
        else:
            self.set_exception(error)


_running: _Discovery | None = None
_discovering: ContextVar[bool] = ContextVar("kernelseam_discovering", default=False)
"""Whether the running code is a plugin's, called by discovery."""


def plugins() -> Plugins:
    """The process's plugins, discovered at first use. Raises InvalidValue for a bad limit."""
    return _wait_for_discovery() if _plugins is None else _plugins


def _wait_for_discovery() -> Plugins:
    global _running
    if _discovering.get():
        raise PluginError(
            "a plugin asks for the plugins during discovery: it would wait for itself"
        )
    with _lock:
        if _plugins is not None:
            return _plugins
        if _running is None or _running.process != os.getpid():
            started = _Discovery()
            started.start()
            # only now: a caller interrupted before leaves no discovery that never runs
            _running = started
        running = _running
    return running.result()


def reset() -> None:
    """Drop the discovered plugins and their caches; the next use discovers again."""
    global _plugins, _running
    with _lock:
        _plugins, _running = None, None


def forget() -> None:
    """Clear the caches of plans and of functions on arrays."""
    current = _plugins
    if current is not None:
        current.forget()
