"""Checks that descriptors share. Each refuses with the field's name, the value, the rule and the
remedy."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from kernelseam.contract import OperandRule
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue, format_value
from kernelseam.overlap import proven_overlap
from kernelseam.symbolic import as_float

MAX_EXTENT = 2**31 - 1
"""Kernels count rows, columns and matrices in 32 bits."""
MAX_BYTES = 2**63 - 1
"""Offsets are 64-bit and signed."""
AXES = ("batch", "head", "row")
"""Axes that have a stride field, for operands that have the axis."""
WIDE = 16
"""Bytes of the widest access."""


def integer(field: str, value: object, low: int, high: int, remedy: str) -> int:
    """An int in [low, high]; NumPy integers count, bools and floats do not."""
    if type(value) is int and low <= value <= high:
        return value
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise InvalidValue(field, format_value(value), "must be an integer", "Pass an int")
    n = +value if isinstance(value, int) else int(value)
    if not low <= n <= high:
        value = n if n.bit_length() <= 64 else f"an integer of {n.bit_length()} bits"
        raise InvalidValue(field, value, f"must be from {low} to {_power(high)}", remedy)
    return n


def _power(high: int) -> str:
    bits = (high + 1).bit_length() - 1
    return f"2**{bits} - 1" if bits > 8 and high + 1 == 1 << bits else str(high)


def choice(field: str, value: object, known: Collection[str], remedy: str) -> str:
    """One of the words ``known``."""
    if not isinstance(value, str) or value not in known:
        raise InvalidValue(field, value, f"must be one of {', '.join(known)}", remedy)
    return value


def extent(field: str, value: object, low: int = 0) -> int:
    """A count of rows, columns, heads or entries: from ``low`` to 2³¹ − 1."""
    return integer(field, value, low, MAX_EXTENT, "Give a count in that range")


def stride(field: str, value: object, dtype: DType) -> int:
    """A stride in elements: not negative, and below 2⁶³ in bytes."""
    return integer(
        field,
        value,
        0,
        MAX_BYTES // dtype.itemsize,
        "Strides count elements, from 0 (broadcast) upward",
    )


def address(field: str, value: object) -> int:
    """A 64-bit address; 0 stands for no memory."""
    return integer(field, value, 0, 2**64 - 1, "Pass the memory's address")


def flag(field: str, value: object) -> bool:
    """True or False; 0, 1 and strings are refused."""
    if not isinstance(value, bool | np.bool_):
        raise InvalidValue(field, format_value(value), "must be True or False", "Pass a bool")
    return bool(value)


def number(field: str, value: object) -> float:
    """A real number as a float; NaN and infinities pass."""
    if isinstance(value, bool | np.bool_) or not isinstance(
        value, int | float | np.integer | np.floating
    ):
        raise InvalidValue(field, format_value(value), "must be a real number", "Pass a float")
    try:
        return as_float(value)
    except OverflowError:
        raise InvalidValue(
            field, "a larger integer", "must be within float64", "Pass a float"
        ) from None


def finite(field: str, value: object) -> float:
    """A real number that is neither NaN nor infinite."""
    x = number(field, value)
    if x - x != 0:
        raise InvalidValue(
            field, x, "must be finite", "Give a finite number, or None for the default"
        )
    return x


def positive(field: str, value: object, remedy: str) -> float:
    """A finite number above 0."""
    x = finite(field, value)
    if x <= 0:
        raise InvalidValue(field, x, "must be greater than 0", remedy)
    return x


def multiple(field: str, value: int, of: str, count: int) -> int:
    """value / count, which must be an integer. 0 / 0 is 1."""
    if (count == 0 and value != 0) or (count and value % count):
        raise InvalidValue(
            field,
            value,
            f"must be a multiple of {of} = {count}",
            f"Make {field} a multiple of {of}",
        )
    return max(value // count, 1) if count else 1


def packed(shape: Sequence[int], given: Sequence[int | None]) -> tuple[int, ...]:
    """Strides of a row-major array; given ones are kept, and the others packed around them. Empty
    axes count as 1."""
    strides: list[int] = []
    run = 1
    for n, s in zip(reversed(shape), reversed(given), strict=True):
        strides.append(run if s is None else s)
        run = max(n, 1) * strides[-1]
    return tuple(reversed(strides))


def row_strides(
    letter: str,
    shape: Sequence[int],
    given: Sequence[object],
    dtype: DType,
    axes: Sequence[str] = (),
) -> tuple[int, ...]:
    """Strides of all axes but the contiguous last: validated where given, packed where None."""
    fields = [f"stride_{letter}_{axis}" for axis in axes or AXES[: len(given)]]
    known = [None if v is None else stride(f, v, dtype) for f, v in zip(fields, given, strict=True)]
    return packed(shape, [*known, 1])[:-1]


def vector_bytes(
    dtype: DType, shape: Sequence[int], strides: Sequence[int], pointer: int | None
) -> int:
    """16 if every row starts at a multiple of 16 bytes, else the element size.

    ``strides`` leave the contiguous last axis out; axes of one entry do not count. An address that
    is not known yet (None) counts as a multiple of 16, which ``bind`` then checks.
    """
    if 0 in shape:
        return WIDE
    steps = [s * dtype.itemsize for n, s in zip(shape, strides, strict=False) if n > 1]
    return WIDE if not any(x % WIDE for x in (pointer or 0, *steps)) else dtype.itemsize


def check_walk(rule: OperandRule, axes: Sequence[str]) -> None:
    """Refuse an operand of 2⁶³ bytes or more, and an output whose elements share memory.

    ``axes``: the stride fields of the axes, for messages; a contiguous last one is never at fault.
    """
    size = 8 if rule.dtype is None else rule.dtype.itemsize
    if any(n * size > MAX_BYTES for n in (math.prod(rule.shape), rule.span, *rule.strides)):
        raise InvalidValue(
            rule.name,
            f"{list(rule.shape)} elements with strides {list(rule.strides)}",
            "must take fewer than 2**63 bytes",
            "Make the extents or the strides smaller",
        )
    if rule.written and rule.span:
        axis = shared_axis(rule)
        if axis is not None:
            raise InvalidValue(
                axes[axis],
                rule.strides[axis],
                f"the {rule.shape[axis]} entries of this axis of {rule.name} share elements "
                f"(extents {list(rule.shape)}, strides {list(rule.strides)})",
                f"An output needs memory of its own for every element: make {axes[axis]} larger",
            )


def shared_axis(rule: OperandRule) -> int | None:
    """The innermost axis along which two entries provably share an element, or None.

    Two index tuples with one address differ first along some axis k. Moving both along an axis
    changes nothing, so entry 0 of axis k meets one of the entries 1, 2, …, with all axes before k
    at index 0.
    """
    run = 1
    for s, n in sorted((s, n) for s, n in zip(rule.strides, rule.shape, strict=True) if n > 1):
        if s < run:
            break
        run += s * (n - 1)
    else:
        return None  # nested: the stride of every axis exceeds the extent of the inner ones
    assert rule.dtype is not None
    base = 1 << 16  # any address: nothing is read
    for k in reversed(range(len(rule.shape))):
        n = rule.shape[k]
        if n < 2:
            continue
        if rule.strides[k] == 0:
            return k
        inner = OperandRule(rule.name, rule.dtype, rule.shape[k + 1 :], rule.strides[k + 1 :], 1)
        later = OperandRule(
            rule.name, rule.dtype, (n - 1, *rule.shape[k + 1 :]), rule.strides[k:], 1
        )
        if proven_overlap(base, inner, base + rule.strides[k] * rule.dtype.itemsize, later):
            return k
    return None


def three(x: tuple[int, ...]) -> tuple[int, int, int]:
    """The same, known to be three."""
    a, b, c = x
    return a, b, c


def two(x: tuple[int, ...]) -> tuple[int, int]:
    """The same, known to be two."""
    a, b = x
    return a, b
