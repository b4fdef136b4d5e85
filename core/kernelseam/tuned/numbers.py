"""The numbers of problems, apart from their specs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

T = TypeVar("T")


def numbers(problem: object) -> Iterable[Any]:
    """All numbers of a problem but its spec's, in order."""
    for f in fields(problem):  # type: ignore[arg-type]
        if f.name != "spec":
            yield from _leaves(getattr(problem, f.name))


def _leaves(x: Any) -> Iterable[Any]:
    if isinstance(x, tuple):
        for y in x:
            yield from _leaves(y)
    elif is_dataclass(x):
        yield from numbers(x)
    elif isinstance(x, int | float):
        yield x


def with_numbers(problem: T, values: Iterable[Any]) -> T:
    """The problem with other numbers, in the order of ``numbers``."""
    left = iter(values)

    def other(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple([other(y) for y in x])
        if is_dataclass(x) and not isinstance(x, type):
            return replace(
                x, **{f.name: other(getattr(x, f.name)) for f in fields(x) if f.name != "spec"}
            )
        return next(left) if isinstance(x, int | float) else x

    result: T = other(problem)
    return result
