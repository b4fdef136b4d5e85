"""Frozen dataclasses, made in less time than the standard library takes, and such with other
fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, fields
from functools import cache, partial
from inspect import get_annotations
from operator import attrgetter, itemgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(*, frozen, eq=True, kw_only=False):
        """``dataclasses.dataclass``, of which Python compiles ``__init__`` alone: six methods each
        of 160 classes were half of what a first call's imports take. Fields, and what ``replace``,
        ``fields`` and the like make of them, are the standard library's."""
        if not frozen:
            raise TypeError("kernelseam.frozen makes frozen ones; see dataclasses.dataclass")
        return partial(_made, eq, kw_only)


def _made(eq: bool, kw_only: bool, kind: Any) -> Any:
    own = dict(vars(kind))
    annotated = get_annotations(kind)
    plain = {n: own[n] for n in annotated if n in own} | {"__annotations__": annotated}
    plain |= {"__module__": kind.__module__, "__doc__": "Its own fields alone."}
    make = dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only)
    described: Any = make(type(kind.__name__, (), plain))
    every: dict[str, Field[Any]] = {}
    for base in reversed(kind.__mro__[1:]):
        every |= vars(base).get("__dataclass_fields__", {})
    kind.__dataclass_fields__ = every | described.__dataclass_fields__
    kind.__dataclass_params__ = _PARAMETERS[eq]
    for name in annotated:
        if isinstance(own.get(name), Field):  # a class has its default, or nothing
            if name in vars(described):
                setattr(kind, name, vars(described)[name])
            else:
                delattr(kind, name)
    there = fields(kind)
    methods = {"__repr__": _repr, **_refusals(kind), **_init(kind, there)}
    if eq:
        hashed = [f for f in there if (f.compare if f.hash is None else f.hash)]
        methods |= _equality([f for f in there if f.compare], hashed)
    for name, method in methods.items():
        if own.get(name) is None:  # a class that has an __eq__ of its own has a __hash__ of None
            setattr(kind, name, method)
    return kind


_PARAMETERS = {
    eq: dataclasses.make_dataclass("Empty", (), frozen=True, eq=eq).__dataclass_params__  # type: ignore[attr-defined]
    for eq in (True, False)
}


def _init(kind: Any, there: tuple[Field[Any], ...]) -> dict[str, Any]:
    """``__init__``, and the names that a ``match`` takes in order."""
    names: dict[str, Any] = {"put": object.__setattr__, "left_out": object()}
    lines, in_order = list[str](), [f for f in there if f.init and not f.kw_only]
    named = [f for f in there if f.init and f.kw_only]
    given = {f: f.name for f in (*in_order, *named)}
    for f in there:
        value = f.name
        if f.default_factory is not MISSING:
            names[f"new_{f.name}"] = f.default_factory
            value = f"new_{f.name}()"
            if f.init:
                given[f] += "=left_out"
                value += f" if {f.name} is left_out else {f.name}"
        elif f.default is not MISSING:
            names[f"of_{f.name}"] = f.default
            if f.init:
                given[f] += f"=of_{f.name}"
        if f.init or f.default_factory is not MISSING:
            lines.append(f" put(self, {f.name!r}, {value})")
    if hasattr(kind, "__post_init__"):
        lines.append(" self.__post_init__()")
    inputs = ["self", *map(given.get, in_order), *["*"][: len(named)], *map(given.get, named)]
    exec(f"def __init__({', '.join(map(str, inputs))}):\n" + "\n".join(lines or [" pass"]), names)
    init = names["__init__"]
    init.__qualname__, init.__module__ = f"{kind.__qualname__}.__init__", kind.__module__
    init.__annotations__ = {f.name: f.type for f in given} | {"return": None}
    return {"__init__": init, "__match_args__": tuple([f.name for f in in_order])}


def _refusals(kind: Any) -> dict[str, Any]:
    def refuse(does: str, self: Any, name: str) -> None:
        if type(self) is kind or name in kind.__dataclass_fields__:
            raise FrozenInstanceError(f"cannot {does} field {name!r}")

    def __setattr__(self: Any, name: str, value: Any) -> None:
        refuse("assign to", self, name)
        super(kind, self).__setattr__(name, value)

    def __delattr__(self: Any, name: str) -> None:
        refuse("delete", self, name)
        super(kind, self).__delattr__(name)

    return {"__setattr__": __setattr__, "__delattr__": __delattr__}


def _equality(compared: list[Field[Any]], hashed: list[Field[Any]]) -> dict[str, Any]:
    of_equal, of_hash = _getter(compared), _getter(hashed)

    def __eq__(self: Any, other: Any) -> Any:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return of_equal(self) == of_equal(other)

    def __hash__(self: Any) -> int:
        known: int | None = self.__dict__.get(_HASH)
        if known is None:  # a problem's takes up to 16 µs, and a choice asks a dozen times
            known = self.__dict__[_HASH] = hash(of_hash(self))
        return known

    return {"__eq__": __eq__, "__hash__": __hash__, "__getstate__": _state}


_HASH = "_hash"
"""Where an object keeps its hash, which is another in another process."""


def _state(self: Any) -> dict[str, Any]:
    return {n: x for n, x in vars(self).items() if n != _HASH}


def _getter(given: list[Field[Any]]) -> Callable[[Any], Any]:
    names = [f.name for f in given]
    return attrgetter(*names, names[0]) if names else lambda x: ()  # of one it makes no tuple


@recursive_repr()
def _repr(self: Any) -> str:
    shown = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.repr]
    return f"{type(self).__qualname__}({', '.join(shown)})"


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
