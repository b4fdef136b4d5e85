"""Options of an operation, each written once: a record is a frozen dataclass whose fields say what
they are by ``scalar`` or ``operand``.

Records are inherited: by descriptors, which have the options as fields, and by larger records. All
that takes options or hands them on reads them here: names, types, defaults, rules and words.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields
from functools import cache
from typing import Any, ParamSpec, TypeVar, cast, get_type_hints

from kernelseam.frozen import dataclass

P = ParamSpec("P")
T = TypeVar("T")
Rule = Callable[[str, Any], object]


@dataclass(frozen=True)
class Option:
    """What a field of a record says of itself."""

    name: str
    type: Any
    default: Any
    says: str
    """What it does, as help and errors word it."""
    rule: Rule | None = None
    """``rule(name, value)``: the value as descriptors take it. Raises InvalidValue. None of an
    operand."""
    axes: str | None = None
    """Of an operand: a letter for each of its axes, B for the batch, H for heads, S for queries and
    L for keys; those that have extent 1, or that it lacks from the left, repeat."""

    @property
    def is_operand(self) -> bool:
        return self.axes is not None

    def checked(self, value: Any) -> Any:
        """The value by its rule; None passes where it is the default. Raises InvalidValue."""
        if self.rule is None or (value is None and self.default is None):
            return value
        return self.rule(self.name, value)


def scalar(default: T, rule: Rule | None, says: str) -> T:
    """A field for an option that is no array."""
    return field(default=default, metadata={"option": {"says": says, "rule": rule}})


def operand(axes: str, says: str) -> Any:
    """A field for an optional operand: an array, an address, or None."""
    about = {"says": says, "axes": axes}
    return field(default=None, repr=False, compare=False, metadata={"option": about})


def options_of(record: Any) -> Mapping[str, Option]:
    """A record's options by name, in order."""
    return _options_of(record)


@cache
def _options_of(record: Any) -> Mapping[str, Option]:
    types = get_type_hints(record)
    return {
        f.name: Option(f.name, types[f.name], f.default, **f.metadata["option"])
        for f in fields(record)
        if "option" in f.metadata
    }


def scalars_of(record: Any) -> tuple[str, ...]:
    """The names of the options that are no operands."""
    return tuple(n for n, o in options_of(record).items() if not o.is_operand)


def operands_of(record: Any) -> tuple[str, ...]:
    """The names of the options that are operands."""
    return tuple(n for n, o in options_of(record).items() if o.is_operand)


def checked(record: object, names: Iterable[str] | None = None) -> dict[str, Any]:
    """A record's scalars by name, each by its rule. Raises InvalidValue."""
    known = options_of(type(record))
    wanted = scalars_of(type(record)) if names is None else names
    return {n: known[n].checked(getattr(record, n)) for n in wanted}


def values_of(record: Callable[P, object], of: str = "") -> Callable[P, tuple[Any, ...]]:
    """A function of the record's scalars by name that returns their values in the record's order,
    defaults for those left out. A call on arrays is found again by them; making the record instead
    would cost it as much as reading several tensors. ``of``: the function whose keywords they are,
    for Python's own refusal of others."""
    names, known = scalars_of(record), options_of(record)
    parameters = ", ".join(f"{n}=_[{n!r}]" for n in names)
    source = f"lambda *, {parameters}: ({', '.join(names)},)"
    function = eval(source, {"_": {n: known[n].default for n in names}})
    function.__name__ = function.__qualname__ = of or cast(type[Any], record).__name__
    return cast(Callable[P, tuple[Any, ...]], function)


def of_values(record: Callable[..., T], values: Iterable[Any]) -> T:
    """The record of values in its order."""
    return record(**dict(zip(scalars_of(record), values, strict=True)))


def read_values(record: type[T], values: Iterable[Any]) -> T:
    """The record of values in its order, each by its rule. Raises InvalidValue."""
    known = options_of(record)
    given = zip(scalars_of(record), values, strict=True)
    return record(**{n: known[n].checked(x) for n, x in given})


def as_values(record: object) -> tuple[Any, ...]:
    """The record's scalars in its order."""
    return tuple([getattr(record, n) for n in scalars_of(type(record))])


def by_name(record: object) -> dict[str, Any]:
    """The record's scalars."""
    return {n: getattr(record, n) for n in scalars_of(type(record))}


def taken(names: Iterable[str], options: dict[str, Any]) -> dict[str, Any]:
    """Those of a function's keywords that have these names and are not None; ``options`` keeps the
    others."""
    found = {n: options.pop(n, None) for n in names}
    return {n: x for n, x in found.items() if x is not None}


def spelled_out(record: object, *names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Have help, editors and ``inspect`` show the options of a record of defaults, all or those of
    these names, in place of a function's ``**options``."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        shown = inspect.signature(function)
        *own, rest = shown.parameters.values()
        assert rest.kind is rest.VAR_KEYWORD
        options = [
            inspect.Parameter(n, rest.KEYWORD_ONLY, default=getattr(record, n), annotation=o.type)
            for n, o in options_of(type(record)).items()
            if n in names or not names
        ]
        position = [p for p in own if p.kind is not p.KEYWORD_ONLY]
        keyword = [p for p in own if p.kind is p.KEYWORD_ONLY]
        whole = shown.replace(parameters=[*position, *options, *keyword])
        function.__signature__ = whole  # type: ignore[attr-defined]
        return function

    return decorate


def refuse_others(function: str, options: Iterable[str], names: Iterable[str]) -> None:
    """Raise TypeError, as Python does, for keywords that a function does not have."""
    for unknown in options:
        if unknown not in names:
            raise TypeError(f"{function}() got an unexpected keyword argument {unknown!r}")
