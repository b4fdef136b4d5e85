"""Names of a package whose modules are imported at their first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def imported_at_use(
    namespace: dict[str, Any], names: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of the module whose ``globals()`` these are. ``names``: by
    module, from the package (``.attention.forward``), the names that it has, with spaces."""
    homes = {name: module for module, have in names.items() for name in have.split()}

    def __getattr__(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {namespace['__name__']!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home, namespace["__package__"]), name)
        namespace[name] = value  # found without this from now on
        return value

    def __dir__() -> list[str]:
        return sorted(namespace["__all__"])

    return __getattr__, __dir__
