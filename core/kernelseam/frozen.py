"""Frozen dataclasses with other fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from operator import itemgetter
from typing import Any, TypeVar

T = TypeVar("T")


def changed(x: T, **given: Any) -> T:
    """As ``dataclasses.replace``, for those that check nothing when they are created, in a third of
    the time: problems and tiles, of which the choice for a class makes dozens. Raises TypeError for
    a name that is no field."""
    kind: Any = type(x)
    (names, values), other = _names(kind), object.__new__(kind)
    vars(other).update(zip(names, values(vars(x)), strict=False), **given)
    if len(vars(other)) != len(names):
        raise TypeError(f"{kind.__name__} has no fields {sorted(given.keys() - set(names))}")
    return other  # type: ignore[no-any-return]


@cache
def _names(kind: Any) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    names = tuple([f.name for f in fields(kind)])
    return names, itemgetter(*names, names[0])  # of one name it would make no tuple
