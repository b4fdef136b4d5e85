"""Wrong arguments: values that nothing takes, values that few parameters take, and right arrays
made wrong."""

from __future__ import annotations

import decimal
import fractions
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any

import numpy as np

Makers = dict[str, Callable[[], Any]]


class Raises:
    """An array of a library that fails when it is asked."""

    @property
    def __dlpack_device__(self) -> Any:
        raise RuntimeError("the library fails")

    def __index__(self) -> int:
        raise RuntimeError("the library fails")


class Unprintable:
    """What cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")

    __str__ = __repr__


def _giving(value: Any) -> Callable[[], Any]:
    return lambda: value


def f32(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


NEVER: Makers = {
    "an object": object,
    "one that raises": Raises,
    "one that cannot be shown": Unprintable,
    "a class": lambda: object,
    "a function": lambda: len,
    "a dict": dict,
    "a dict of an array": lambda: {"x": f32(3)},
    "a set": lambda: {1, 2},
    "bytes": lambda: b"x",
    "a memoryview": lambda: memoryview(b"xyz"),
    "a slice": lambda: slice(1),
    "Ellipsis": lambda: ...,
    "an exception": lambda: ValueError("x"),
    "a generator": lambda: (i for i in (1, 2)),
    "a complex number": lambda: 2j,
    "a fraction": lambda: fractions.Fraction(1, 2),
    "a decimal": lambda: decimal.Decimal(2),
    "a datetime": lambda: np.datetime64("2020-01-01"),
    "a dtype of objects": lambda: np.dtype("O"),
    "a long string": lambda: "x" * 10_000,
    "a list of objects": lambda: [object()] * 3,
    "a list of a list": lambda: [[[]]],
    "an array of objects": lambda: np.array([None, object()]),
    "a 0-d array of objects": lambda: np.array(None),
    "an array of strings": lambda: np.array(["x", "y"]),
    "an array of datetimes": lambda: np.zeros(3, "M8[s]"),
    "an array of records": lambda: np.zeros(3, "i4,f4"),
    "an array of complex": lambda: np.zeros((2, 4, 5, 8), "c8"),
    "a masked array": lambda: np.ma.masked_array(f32(2, 4, 5, 8)),
}
"""None of these is right anywhere."""
SELDOM: Makers = {
    "None": lambda: None,
    "True": lambda: True,
    "False": lambda: False,
    "a string": lambda: "x",
    "an empty string": str,
    "a dtype's name": lambda: "float64",
    "a dtype": lambda: np.dtype("f2"),
    "a type": lambda: float,
    # integers
    **{str(n): _giving(n) for n in (0, 1, -1, 2**31 - 1, 2**31, 2**63, 2**70, -(2**70))},
    "an int too long to print": lambda: 10**5000,
    # other numbers
    **{str(x): _giving(x) for x in (0.0, 2.5, 1e300, float("nan"), float("inf"), float("-inf"))},
    "np.int64": lambda: np.int64(2),
    "np.float32": lambda: np.float32(2),
    "np.float16 inf": lambda: np.float16("inf"),
    "np.bool_": lambda: np.True_,
    "np.longdouble": lambda: np.longdouble(2),
    # arrays
    "a 0-d array": f32,
    "a 0-d array of int64": lambda: np.array(2),
    "a 0-d array of bool": lambda: np.array(True),
    "a vector": lambda: f32(3),
    "a vector of int32": lambda: np.zeros(3, np.int32),
    "a vector of int64": lambda: np.zeros(3, np.int64),
    "a matrix": lambda: f32(3, 4),
    "6 axes": lambda: f32(*[1] * 6),
    "32 axes": lambda: f32(*[1] * 32),
    "an empty array": lambda: f32(0),
    "an empty array of 4 axes": lambda: f32(0, 0, 0, 0),
    "an array of uint8": lambda: np.zeros((2, 4), np.uint8),
    "an array of bool": lambda: np.zeros((2, 4), bool),
    "an array of longdouble": lambda: np.zeros((2, 4), "g"),
    "an array of the other byte order": lambda: np.zeros((2, 4), ">f4"),
    "a repeated array": lambda: np.broadcast_to(np.float32(1), (2, 4, 5, 8)),
    "an unaligned array": lambda: np.zeros(161, np.uint8)[1:].view(np.float32),
    # lists and tuples
    "an empty list": list,
    "an empty tuple": tuple,
    "a list": lambda: [1, 2],
    "a pair": lambda: (1, 2),
    "a pair of None": lambda: (None, None),
    "a pair of bools": lambda: (True, False),
    "a pair of floats": lambda: (1.5, 2.5),
    "a pair of arrays": lambda: (f32(3),) * 2,
    "three arrays": lambda: (f32(2, 4, 5, 8),) * 3,
    "a list of matrices": lambda: [f32(5, 8)] * 2,
    "a long list": lambda: list(range(100_000)),
    "a list of None": lambda: [None] * 8,
    "a list of zeros": lambda: [0] * 8,
    "a list of -1": lambda: [-1] * 8,
    "a list of 2**70": lambda: [2**70] * 8,
}
"""Some parameters take some of these."""


def _read_only(x: Any) -> Any:
    x = x.copy()
    x.flags.writeable = False
    return x


SPOILED: dict[str, Callable[[Any], Any]] = {
    "read-only": _read_only,
    "masked": np.ma.masked_array,
    "a list": lambda x: x.tolist(),
    **{f"of {t}": methodcaller("astype", t) for t in ("O", "U", "c8", "f2", "f8", "i8", "?")},
    "of the other byte order": lambda x: x.astype(x.dtype.newbyteorder()),
    "with one axis more": lambda x: x[None],
    "with one axis less": lambda x: x[0],
    "flat": lambda x: x.reshape(-1),
    "0-d": lambda x: x.reshape(-1)[:1].reshape(()),
    "a scalar": lambda x: x.reshape(-1)[0],
    "shorter": lambda x: x[:-1],
    "narrower": lambda x: x[..., :-1],
    "empty": lambda x: x[:0],
    "backwards": lambda x: x[::-1],
    "backwards in rows": lambda x: x[..., ::-1],
    "column-major": np.asfortranarray,
    "with gaps": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "repeated": lambda x: np.broadcast_to(x[:1], x.shape),
    "of -1": lambda x: x * 0 - 1 if x.dtype.kind == "i" else x,
}
"""A right array made wrong."""


def spoiled(value: Any) -> Makers:
    """What a right value may be made into: an array, or a list or tuple of them."""
    if isinstance(value, np.ndarray):
        return {name: partial(make, value) for name, make in SPOILED.items()}
    if not isinstance(value, list | tuple) or not value or not isinstance(value[0], np.ndarray):
        return {}
    result: Makers = {
        "one less": lambda: value[:-1],
        "one more": lambda: type(value)([*value, value[0]]),
    }
    for i in (0, len(value) - 1):
        for name, make in {**spoiled(value[i]), **NEVER, **SELDOM}.items():
            result[f"entry {i} {name}"] = partial(_with_entry, value, i, make)
    return result


def _with_entry(value: Any, i: int, make: Callable[[], Any]) -> Any:
    return type(value)([*value[:i], make(), *value[i + 1 :]])


def wrong(value: Any) -> Makers:
    """All that may stand in the place of a right value."""
    return {**NEVER, **SELDOM, **spoiled(value)}
