"""pluggy, for one plugin a manager and hooks without order: what discovery asks of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class _Marker:
    """Marks functions: a project's hooks, or their implementations."""

    kind = ""

    def __init__(self, project_name: str) -> None:
        self._attribute = f"{project_name}_{self.kind}"

    def __call__(self, function: F) -> F:
        setattr(function, self._attribute, True)
        return function


class HookspecMarker(_Marker):
    kind = "spec"


class HookimplMarker(_Marker):
    kind = "impl"


class PluginValidationError(Exception):
    """A plugin's hook is not one of the project's, or takes other arguments."""


class PluginManager:
    """The hooks of a project, and the plugin that implements some."""

    def __init__(self, project_name: str) -> None:
        self._project = project_name
        self._specs: dict[str, Callable[..., Any]] = {}
        self._implementations: dict[str, list[Callable[..., Any]]] = {}
        self.hook = SimpleNamespace()

    def add_hookspecs(self, namespace: Any) -> None:
        for name, spec in self._marked(namespace, "spec"):
            self._specs[name] = spec
            found = self._implementations.setdefault(name, [])
            setattr(self.hook, name, lambda found=found, **given: _results(found, given))

    def register(self, plugin: Any, name: str | None = None) -> None:
        for hook, function in self._marked(plugin, "impl"):
            self._implementations.setdefault(hook, []).append(function)

    def check_pending(self) -> None:
        """Raises PluginValidationError for an implementation of no hook, or of other arguments."""
        for name, functions in self._implementations.items():
            if functions and name not in self._specs:
                raise PluginValidationError(f"unknown hook {name!r}")
            for function in functions:
                taken = inspect.signature(function).parameters
                if not set(taken) <= set(inspect.signature(self._specs[name]).parameters):
                    raise PluginValidationError(f"hook {name!r} takes other arguments")

    def _marked(self, namespace: Any, kind: str) -> list[tuple[str, Callable[..., Any]]]:
        attribute = f"{self._project}_{kind}"
        found = [(n, getattr(namespace, n, None)) for n in dir(namespace)]
        return [(n, f) for n, f in found if inspect.isroutine(f) and getattr(f, attribute, False)]


def _results(found: list[Callable[..., Any]], given: dict[str, Any]) -> list[Any]:
    """Those of every implementation but None, each called with the arguments that it takes."""
    results = [
        f(**{n: given[n] for n in inspect.signature(f).parameters if n in given}) for f in found
    ]
    return [r for r in results if r is not None]
