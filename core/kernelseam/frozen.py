"""Frozen dataclasses, made in less time than the standard library takes, and such with other
fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import fields
from functools import cache, partial
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(*, frozen, eq=True, kw_only=False):
        """``dataclasses.dataclass(frozen=True)``, for which Python does not compile ``__repr__``,
        ``__eq__`` and ``__hash__`` anew: of 160 classes these were a third of what a first call's
        imports take."""
        if not frozen:
            raise TypeError("kernelseam.frozen makes frozen ones; see dataclasses.dataclass")
        return partial(_made, eq, kw_only)


def _made(eq: bool, kw_only: bool, kind: Any) -> Any:
    own = set(vars(kind))
    made: Any = dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=kw_only)(kind)
    there = fields(made)
    methods: dict[str, Any] = {"__repr__": _shown([f.name for f in there if f.repr])}
    if eq:
        hashed = _values([f.name for f in there if (f.compare if f.hash is None else f.hash)])
        methods |= {
            "__eq__": _equality(_values([f.name for f in there if f.compare])),
            "__hash__": _hash_of(hashed),
            "__getstate__": _state,
        }
    for name, method in methods.items():
        # a class that has an __eq__ of its own has a __hash__ of None
        if name not in own or vars(made)[name] is None:
            setattr(made, name, method)
    return made


def _values(names: list[str]) -> Callable[[Any], Any]:
    return attrgetter(*names, names[0]) if names else lambda x: ()  # of one it makes no tuple


_HASH = "_hash"
"""Where an instance keeps its hash: a choice among kernels asks for a spec's dozens of times."""


def _hash_of(values: Callable[[Any], Any]) -> Callable[[Any], int]:
    def __hash__(self: Any) -> int:
        kept: int | None = vars(self).get(_HASH)
        if kept is None:
            kept = vars(self)[_HASH] = hash(values(self))
        return kept

    return __hash__


def _state(self: Any) -> dict[str, Any]:
    """What is pickled: in another process hashes are others."""
    return {name: x for name, x in vars(self).items() if name != _HASH}


def _equality(compared: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    def __eq__(self: Any, other: Any) -> Any:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return compared(self) == compared(other)

    return __eq__


def _shown(names: list[str]) -> Callable[[Any], str]:
    @recursive_repr()
    def __repr__(self: Any) -> str:
        shown = ", ".join([f"{name}={getattr(self, name)!r}" for name in names])
        return f"{type(self).__qualname__}({shown})"

    return __repr__


def changed(x: T, **given: Any) -> T:
    """As ``dataclasses.replace``, for those that check nothing when they are created, in a third of
    the time: problems and tiles, of which the choice for a class makes dozens. Raises TypeError for
    a name that is no field."""
    kind: Any = type(x)
    other, names = object.__new__(kind), _names(kind)
    own = vars(other)
    own.update(vars(x))
    while len(own) > len(names):  # what was computed of x, and kept there, comes after its fields
        own.popitem()
    own.update(given)
    if len(own) != len(names):
        raise TypeError(f"{kind.__name__} has no fields {sorted(given.keys() - set(names))}")
    return other  # type: ignore[no-any-return]


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple([f.name for f in fields(kind)])
