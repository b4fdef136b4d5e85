"""How float32 is multiplied: the names of precisions, checked."""

from __future__ import annotations

from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue

IEEE, PRECISIONS = "ieee", ("tf32", "tf32x3")
"""How float32 may be multiplied: the default, and others."""


def precision_name(field: str, value: object) -> str:
    """The name of a precision. Raises InvalidValue."""
    if not isinstance(value, str) or value not in (IEEE, *PRECISIONS):
        names = ", ".join((IEEE, *PRECISIONS))
        raise InvalidValue(
            field, value, f"must be one of {names}", f"Name one of these, or leave {field} out"
        )
    return value


def precision_of(value: object, dtype: DType, operands: str) -> str | None:
    """A spec's precision from what a descriptor is given, whose ``operands`` are of ``dtype``.
    Raises InvalidValue."""
    if value is None:
        return None
    value = precision_name("precision", value)
    if value == IEEE:
        return None
    if dtype is not DType.float32:
        raise InvalidValue(
            "precision",
            value,
            f"is a way to multiply float32, and {operands} are {dtype}",
            "Leave precision out",
        )
    return value
