"""JSON from disk, held against the types of dataclasses' fields: a file may be damaged, edited or
written by hand."""

from __future__ import annotations

import json
import types
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from kernelseam.errors import format_value


class SchemaError(ValueError):
    """A value that its field cannot have: where it is, the value, and the rule that it breaks."""

    def __init__(self, at: str, value: object, rule: str) -> None:
        super().__init__(f"{at} = {format_value(value)}: {rule}")
        self.at, self.value, self.rule = at, value, rule


def parsed(text: str | bytes) -> Any:
    """The content of a JSON text. Raises ValueError, whatever is wrong with it."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def typed(kind: type, value: object, at: str) -> Any:
    """The value, if it is of the kind. Raises SchemaError."""
    if not isinstance(value, kind):
        raise SchemaError(at, value, f"must be a {kind.__name__}")
    return value


def decoded(hint: Any, value: Any, at: str) -> Any:
    """The value as a field of this type holds it: a dataclass, an enumeration, a tuple, a dict by
    strings, a number, a string, or one of these or None. Raises SchemaError.

    ``at``: the value's place in the file, for messages.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is types.UnionType:  # X | None
        if value is None:
            return None
        (hint,) = (kind for kind in arguments if kind is not type(None))
        return decoded(hint, value, at)
    if origin is tuple:
        return _tuple(arguments, typed(list, value, at), at)
    if origin is dict:
        return {n: decoded(arguments[1], v, f"{at}.{n}") for n, v in typed(dict, value, at).items()}
    if is_dataclass(hint):
        return _dataclass(hint, typed(dict, value, at), at)  # type: ignore[arg-type]
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(value)
        except (ValueError, TypeError):
            names = ", ".join(str(x.value) for x in hint)
            raise SchemaError(at, value, f"must be one of {names}") from None
    if hint is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise SchemaError(at, value, "must be within float64") from None
    if type(value) is not hint:
        raise SchemaError(at, value, f"must be a {hint.__name__}")
    return value


def _tuple(kinds: tuple[Any, ...], values: list[Any], at: str) -> tuple[Any, ...]:
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        kinds = (kinds[0],) * len(values)
    if len(values) != len(kinds):
        raise SchemaError(at, values, f"must have {len(kinds)} entries")
    return tuple(
        decoded(k, v, f"{at}[{i}]") for i, (k, v) in enumerate(zip(kinds, values, strict=True))
    )


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _dataclass(kind: type, value: dict[str, Any], at: str) -> Any:
    own = {f.name: f for f in fields(kind)}
    if unknown := sorted(value.keys() - own.keys()):
        raise SchemaError(at, unknown[0], f"is no field of a {kind.__name__}")
    for name, field in own.items():
        required = field.default is MISSING and field.default_factory is MISSING
        if required and name not in value:
            raise SchemaError(f"{at}.{name}", None, "is missing")
    hints = _hints(kind)
    return kind(**{n: decoded(hints[n], v, f"{at}.{n}") for n, v in value.items()})
