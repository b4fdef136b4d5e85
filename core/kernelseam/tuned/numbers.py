"""The numbers of problems, apart from their specs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


@cache
def _names(kind: Any) -> tuple[str, ...] | None:
    """The fields of a dataclass, but the spec; None of other types."""
    return tuple([f.name for f in fields(kind) if f.name != "spec"]) if is_dataclass(kind) else None


def numbers(problem: object) -> list[Any]:
    """All numbers of a problem but its spec's, in order."""
    found: list[Any] = []
    _collect(problem, found)
    return found


def _collect(x: Any, found: list[Any]) -> None:
    if isinstance(x, tuple):
        for y in x:
            _collect(y, found)
    elif isinstance(x, int | float):
        found.append(x)
    else:
        kind: Any = type(x)
        for name in _names(kind) or ():
            _collect(getattr(x, name), found)


def with_numbers(problem: T, values: Iterable[Any]) -> T:
    """The problem with other numbers, in the order of ``numbers``."""
    left = iter(values)

    def other(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple([other(y) for y in x])
        if isinstance(x, int | float):
            return next(left)
        kind: Any = type(x)
        names = _names(kind)
        return x if names is None else replace(x, **{n: other(getattr(x, n)) for n in names})

    result: T = other(problem)
    return result
