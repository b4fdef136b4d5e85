"""Discovery: every entry point of the group is tried on its own, and a broken one harms nobody."""

from __future__ import annotations

import logging
import math
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, TypeVar

import pluggy

from kernelseam import hookspecs
from kernelseam.containment import Contained, told, traceback_of
from kernelseam.contract import CONTRACT_VERSION, Backend, Device, PluginInfo
from kernelseam.contract_values import held, held_archs, held_devices
from kernelseam.deadline import Hung, probe_seconds, within
from kernelseam.errors import PluginError, UnknownName, shown
from kernelseam.forking import new_lock
from kernelseam.registry import KernelsOf, Registry

GROUP = "kernelseam"
BUILT_IN = metadata.EntryPoint("reference", "kernelseam.builtin", GROUP)
"""The core's own plugin, named as any other: discovery imports none."""
_log = logging.getLogger("kernelseam")
T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """A plugin that was kept out, and why."""

    plugin: str
    stage: str
    """"metadata", "import", "kernelseam_info", "contract", "kernelseam_register",
    "kernelseam_doctor", "devices" or "archs"; of an implementation "supports" (its cost included),
    "build", "call" or "numbers"."""
    message: str
    traceback: str


@dataclass(frozen=True)
class Plugins:
    """The outcome of discovery."""

    registry: Registry
    loaded: Mapping[str, PluginInfo]
    modules: Mapping[str, object]
    failures: tuple[Failure, ...]
    seconds: float = math.inf
    """The time limit of a plugin's code where it runs for the first time."""
    _listed: dict[str, tuple[Device, ...] | Hung] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    memory: dict[type, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """By its kind, what is remembered of these plugins: see ``remembered``."""

    def remembered(self, kind: type[T]) -> T:
        """What of a kind is remembered of these plugins, empty at first: it goes with them, and at
        ``forget``."""
        found: T | None = self.memory.get(kind)
        return self.memory.setdefault(kind, kind()) if found is None else found

    def forget(self) -> None:
        """Drop what is remembered: plans, and what the functions on arrays bound of them."""
        self.memory.clear()

    def backend(self, name: str) -> Backend:
        """The backend of that name; raises UnknownName with those there are."""
        try:
            return self.registry.backends[name]
        except KeyError:
            raise UnknownName(
                "backend",
                name,
                f"must be one of {', '.join(sorted(self.registry.backends))}",
                f"Install kernelseam[{shown(name)}], or see `kernelseam doctor` for a plugin "
                "that was kept out",
            ) from None

    def devices_of(self, backend: Backend) -> Sequence[Device]:
        """The backend's devices, listed once, within the time limit. Raises Hung, from then on at
        once, where it does not come back; PluginError for what are no devices; and whatever it
        raises itself."""
        found = self._listed.get(backend.name)
        if found is None:
            try:
                found = within(
                    self.seconds,
                    f"listing the devices of backend {backend.name}",
                    _devices,
                    backend,
                )
            except Hung as e:
                found = Hung(str(e), e.stack)
            self._listed[backend.name] = found
        if isinstance(found, Hung):
            # a new one: the first would keep its caller's frames
            raise Hung(str(found), found.stack)
        return found

    def devices(self) -> list[Device]:
        """Every device of every backend, the host last. A backend that cannot list its own has
        none."""
        found: list[Device] = []
        for b in sorted(self.registry.backends.values(), key=lambda b: -b.priority):
            try:
                found.extend(self.devices_of(b))
            except Exception:
                _log.warning("backend %s does not list its devices", b.name, exc_info=True)
        return found

    def archs_of(self, backend: Backend) -> tuple[str, ...]:
        """What the backend's toolchain compiles for, nothing where it has none; raises what the
        toolchain raises, and PluginError for what are none."""
        if backend.toolchain is None:
            return ()
        with Contained(f"listing the archs of backend {backend.name}"):
            return held_archs(backend.name, backend.toolchain.archs)

    def doctor(self) -> dict[str, Any]:
        """Each plugin's own report; one that raises or hangs is reported in its place."""
        report: dict[str, Any] = {}
        for name, module in self.modules.items():
            try:
                report[name] = within(self.seconds, "kernelseam_doctor", _report, module)
            except Exception as e:
                report[name] = failure(name, "kernelseam_doctor", e)
        return report


def _devices(backend: Backend) -> tuple[Device, ...]:
    return held_devices(backend.name, backend.runtime.devices())


def _report(module: object) -> dict[str, Any]:
    """What the plugin's own doctor says, as data with none of its objects behind them; {} where it
    has none."""
    hook = getattr(module, "kernelseam_doctor", dict)
    return {str(name): _plain(value) for name, value in dict(hook()).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if value is None or type(value) in (bool, int, float, str) else str(value)


def failure(name: str, stage: str, error: BaseException) -> Failure:
    """What an exception of a plugin's code says."""
    return Failure(name, stage, told(error), traceback_of(error))


def _info(module: object, manager: pluggy.PluginManager, name: str) -> PluginInfo:
    """What the plugin says of itself. Even registering it runs its code: pluggy looks at each of
    its attributes."""
    manager.add_hookspecs(hookspecs)
    manager.register(module, name=name)
    manager.check_pending()
    info = manager.hook.kernelseam_info()
    if len(info) != 1:
        raise PluginError(f"kernelseam_info of {name!r} must return one PluginInfo, got {info!r}")
    return held(f"kernelseam_info of {name!r}", info[0], PluginInfo)


def _registered(manager: pluggy.PluginManager, kernels_of: KernelsOf) -> Registry:
    scratch = Registry(kernels_of=kernels_of)
    manager.hook.kernelseam_register(registry=scratch)
    return scratch


def _installed(failures: list[Failure]) -> list[metadata.EntryPoint]:
    """Every entry point of the group. A distribution whose metadata cannot be read is a failure,
    and stops no other."""
    try:
        return list(metadata.entry_points(group=GROUP))
    except Exception:  # it does not say whose they are
        found: list[metadata.EntryPoint] = []
    names = set()
    for distribution in metadata.distributions():
        name = "a distribution without a name"
        try:
            name = distribution.metadata["Name"] or name
            # the first on the path hides the others
            if (normal := re.sub("[-_.]+", "-", name).lower()) not in names:
                names.add(normal)
                found += distribution.entry_points.select(group=GROUP)
        except Exception as e:
            failures.append(failure(f"{name} in {distribution.locate_file('')}", "metadata", e))
    return found


def discover(
    entry_points: Iterable[metadata.EntryPoint] | None = None, only: str | None = None
) -> Plugins:
    """Load the built-in reference and every entry point of the group.

    ``only`` (default: the variable KERNELSEAM_PLUGINS) is a comma-separated list of entry-point
    names; the reference is always there. Importing a plugin and each of its hooks run under the
    time limit of KERNELSEAM_PROBE_SECONDS; whatever fails there is among the result's failures.
    Raises InvalidValue for a bad limit.
    """
    seconds = probe_seconds()
    only = os.environ.get("KERNELSEAM_PLUGINS") if only is None else only
    wanted = None if only is None else {n.strip() for n in only.split(",") if n.strip()}
    failures: list[Failure] = []
    # It is no stranger: what fails in it is raised, and not kept as a failure of a core without a
    # reference.
    own: Any = BUILT_IN.load()
    places: dict[str, object] = {BUILT_IN.name: own}
    modules: dict[str, object] = {BUILT_IN.name: own}
    registry, loaded = Registry(kernels_of=own.kernels_of), {BUILT_IN.name: own.kernelseam_info()}
    scratch = Registry(kernels_of=own.kernels_of)
    own.kernelseam_register(scratch)
    registry.merge(scratch, BUILT_IN.name)

    entries = _installed(failures) if entry_points is None else entry_points
    found = [e for e in entries if wanted is None or e.name in wanted]
    for name in sorted((wanted or set()) - {BUILT_IN.name, *(e.name for e in found)}):
        missing = PluginError(
            f"KERNELSEAM_PLUGINS names {name!r}, but no entry point of that name is installed"
        )
        failures.append(failure(name, "import", missing))
    for entry in found:
        name, stage = entry.name, "import"
        # its own: what it does to it, no other plugin meets
        manager = pluggy.PluginManager(hookspecs.PROJECT)
        try:
            if name in loaded:
                raise PluginError(
                    f"two plugins are named {name!r}: {_place(places[name])} is loaded, "
                    f"{_place(entry)} is kept out"
                )
            module: object = within(seconds, "its import", entry.load)
            stage = "kernelseam_info"
            info = within(seconds, stage, _info, module, manager, name)
            stage = "contract"
            if info.contract_version != CONTRACT_VERSION:
                raise PluginError(
                    f"plugin {name!r} speaks contract version {info.contract_version}, this core "
                    f"{CONTRACT_VERSION}: "
                    f"install versions of both that agree"
                )
            stage = "kernelseam_register"
            scratch = within(seconds, stage, _registered, manager, registry.kernels_of)
            with Contained(f"what {name!r} registers"):
                registry.merge(scratch, name)
        except Exception as e:
            failures.append(failure(name, stage, e))
            continue
        loaded[name], modules[name], places[name] = info, module, entry
    return Plugins(registry, loaded, modules, tuple(failures), seconds)


def _place(source: object) -> str:
    """Where a plugin's code is, for people."""
    if not isinstance(source, metadata.EntryPoint):
        return "the core's own"
    return source.value + (f" of {source.dist.name} {source.dist.version}" if source.dist else "")


_lock = new_lock()
_plugins: Plugins | None = None


class _Discovery(Future[Plugins]):
    """A discovery in a thread of its own, which Ctrl-C does not reach: it ends the wait of whoever
    asked, and the next who asks gets what is found. An import that it cut short in the main thread
    may leave a lock of Python's behind, and every later import of that module in another thread
    waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.process = os.getpid()
        """A forked child has none of its parent's threads."""

    def start(self) -> None:
        threading.Thread(target=self._work, name="kernelseam: discovery", daemon=True).start()

    def _work(self) -> None:
        global _plugins, _running
        _discovering.set(True)
        found, error = None, None
        try:
            found = discover()
        except BaseException as e:
            error = e
        with _lock:
            if _running is self:
                _plugins, _running = found, None
        if found is not None:
            self.set_result(found)
        else:
            self.set_exception(error)


_running: _Discovery | None = None
_discovering: ContextVar[bool] = ContextVar("kernelseam_discovering", default=False)
"""Whether this is a plugin's code, loaded by a discovery."""


def plugins() -> Plugins:
    """The process's plugins, discovered at first use. Raises InvalidValue for a bad limit."""
    return _discovered() if _plugins is None else _plugins


def _discovered() -> Plugins:
    global _running
    if _discovering.get():
        raise PluginError(
            "a plugin asks for the plugins while they are discovered: it would wait for itself"
        )
    with _lock:
        if _plugins is not None:
            return _plugins
        if _running is None or _running.process != os.getpid():
            started = _Discovery()
            started.start()
            # not before it runs: who is interrupted in between leaves nothing to wait for
            _running = started
        running = _running
    return running.result()


def reset() -> None:
    """Forget what was discovered, and what is remembered of it; the next use looks again."""
    global _plugins, _running
    with _lock:
        _plugins, _running = None, None


def forget() -> None:
    """Drop every remembered plan, and what the functions on arrays remember of them."""
    found = _plugins
    if found is not None:
        found.forget()
