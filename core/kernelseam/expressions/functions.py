"""Functions of one element, by the names that Python's operators, NumPy and torch give them."""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from kernelseam.expressions.nodes import Node, Type, cast, constant, make
from kernelseam.expressions.operations import OPERATIONS

ELEMENT_TYPES = {
    "bool": Type.BOOLEAN,
    **dict.fromkeys(("uint8", "int8", "int16", "int32"), Type.INT32),
    "int64": Type.INT64,
    **dict.fromkeys(("float16", "bfloat16", "float32", "float64"), Type.FLOAT),
}
"""Dtypes by name, of captured arrays and of casts, and what they are in an expression."""


class Untraceable(Exception):
    """What an expression cannot have: the rule, and what to write instead."""

    def __init__(self, rule: str, remedy: str) -> None:
        super().__init__(f"{rule}. {remedy}")
        self.rule, self.remedy = rule, remedy


def as_node(x: Any) -> Node:
    """A node, or a number as a constant."""
    if isinstance(x, Node):
        return x
    if hasattr(x, "item") and getattr(x, "ndim", 1) == 0:  # made inside the function
        x = x.item()
    if isinstance(x, bool | int | float):
        return constant(x)
    raise Untraceable(
        f"{type(x).__name__} cannot be part of an expression", "Use numbers, and arrays by element"
    )


def _make(operation: str) -> Callable[..., Node]:
    convert = _bits if OPERATIONS[operation].rule == "bits" else as_node
    return lambda *xs: make(operation, *map(convert, xs))


def _bits(x: Any) -> Node:
    if (n := as_node(x)).type is Type.FLOAT:
        raise Untraceable(
            "& | ^ ~ << >> are of integers and bools, and this is a float",
            "Convert it, or write 1 << n for 2 ** n",
        )
    return n


def _cast(type: Type) -> Callable[..., Node]:
    return lambda x, *_, **__: cast(as_node(x), type)


def _to(x: Any, *given: Any, dtype: Any = None, **_: Any) -> Node:
    """torch's ``to``. Devices and memory formats are nothing here."""
    y = as_node(x)
    for one in (*given[:2], dtype):
        if isinstance(one, Node):  # to another value
            y = cast(y, one.type)
        elif one is not None and (name := _dtype_name(one)) is not None:
            y = _converted(y, name)
    return y


def _astype(x: Any, dtype: Any = None, *_: Any, **__: Any) -> Node:
    """NumPy's, and torch's ``type`` and ``type_as``."""
    if dtype is not None and not isinstance(dtype, Node) and _dtype_name(dtype) is None:
        raise Untraceable(f"{dtype!r} is no dtype", f"Give one of {', '.join(ELEMENT_TYPES)}")
    return _to(x, dtype)


def _dtype_name(dtype: Any) -> str | None:
    """As NumPy, torch or Python call it; None where it is none."""
    if not isinstance(dtype, type):
        dtype = getattr(dtype, "dtype", dtype)  # a tensor's, made inside the function
    name = str(getattr(dtype, "__name__", dtype))
    if name.startswith("torch.") or name in ELEMENT_TYPES or name in _PYTHON:
        return name.removeprefix("torch.")
    try:
        return str(np.dtype(dtype).name)
    except TypeError:
        return None


def _converted(x: Node, name: str) -> Node:
    type = ELEMENT_TYPES.get(name, _PYTHON.get(name))
    if name in ("float16", "bfloat16"):
        raise Untraceable(
            f"the function rounds to {name}, and expressions are of float32",
            "Leave the conversion out",
        )
    if type is None:
        raise Untraceable(
            f"{name} is no type that an expression has", "Convert to bool, int32, int64 or float32"
        )
    y = cast(x, type)
    if name in _NARROW:
        ones, sign = map(constant, _NARROW[name])
        y = make("sub", make("bitxor", make("bitand", y, ones), sign), sign)
    return y


_PYTHON = {"float": Type.FLOAT, "int": Type.INT64, "bool": Type.BOOLEAN}
_NARROW = {"uint8": (255, 0), "int8": (255, 128), "int16": (65535, 32768)}
"""Of integers of fewer bits: all of them, and the sign. They are computed as int32."""


def where(condition: Any, x: Any, y: Any) -> Node:
    return make("where", as_node(condition), as_node(x), as_node(y))


def _clamp(
    x: Any, min: Any = None, max: Any = None, *, a_min: Any = None, a_max: Any = None
) -> Node:
    """The derivative is 1 at both ends, as torch's: not that of minimum and maximum."""
    y = as_node(x)
    ends = (min if a_min is None else a_min), (max if a_max is None else a_max)
    for bound, inner, outer in ((ends[0], "lt", "max"), (ends[1], "gt", "min")):
        if bound is None:
            continue
        end = as_node(bound)
        floats = Type.FLOAT in (y.type, end.type)
        y = where(FUNCTIONS[inner](y, end), end, y) if floats else make(outer, y, end)
    return y


def _either(logic: str, other: str) -> Callable[..., Node]:
    """Of two bools what NumPy and torch make of them: a bool."""

    def either(x: Any, y: Any) -> Node:
        x, y = as_node(x), as_node(y)
        return _make(logic if x.type == y.type == Type.BOOLEAN else other)(x, y)

    return either


def _truth(x: Any) -> Node:
    return cast(as_node(x), Type.BOOLEAN)


def _unequal(x: Any, y: Any) -> Node:
    return make("not", make("eq", as_node(x), as_node(y)))


def _xor(x: Any, y: Any) -> Node:
    x, y = as_node(x), as_node(y)
    return _unequal(x, y) if x.type == y.type == Type.BOOLEAN else _make("bitxor")(x, y)


def _invert(x: Any) -> Node:
    x = as_node(x)
    return make("not", x) if x.type is Type.BOOLEAN else make("sub", constant(-1), _bits(x))


def _pow(x: Any, y: Any) -> Node:
    if isinstance(y, int) and 0 < y < 5:
        return functools.reduce(_make("mul"), [as_node(x)] * y)
    return make("sqrt", as_node(x)) if y == 0.5 else make("pow", as_node(x), as_node(y))


def _div(x: Any, y: Any, rounding_mode: str | None = None) -> Node:
    if rounding_mode not in (None, "floor"):
        raise Untraceable(f'rounding_mode = "{rounding_mode}" is not supported', 'Use "floor"')
    return make("floordiv" if rounding_mode == "floor" else "div", as_node(x), as_node(y))


def _gelu(x: Any, approximate: str = "none") -> Node:
    add, mul = _make("add"), _make("mul")
    if approximate == "tanh":  # (1 + tanh(u)) / 2 is the sigmoid of 2u
        cubic = mul(0.044715, _pow(x, 3))
        return mul(x, _make("sigmoid")(mul(math.sqrt(8 / math.pi), add(x, cubic))))
    return mul(x, _make("ndtr")(x))


def _softplus(x: Any, beta: float = 1, threshold: float = 20) -> Node:
    scaled = _make("mul")(x, float(beta))
    beyond = make("lt", constant(float(threshold)), scaled)
    low = where(beyond, 0.0, scaled)  # a derivative of 0·inf would be NaN
    return where(beyond, x, _make("div")(_make("log1p")(_make("exp")(low)), float(beta)))


def _new(value: int | None = None) -> Callable[..., Node]:
    """torch's ``zeros_like``, ``full_like``, …: one number for each element."""

    def like(x: Any, fill: Any = value, *_: Any, dtype: Any = None, **__: Any) -> Node:
        number = as_node(fill if value is None else value)
        return cast(number, as_node(x).type) if dtype is None else _to(number, dtype)

    return like


def _filled(x: Any, mask: Any, value: Any) -> Node:
    return where(mask, value, x)


FUNCTIONS: dict[str, Callable[..., Node]] = {
    **{name: _make(name) for name in OPERATIONS},
    "gt": lambda x, y: make("lt", as_node(y), as_node(x)),
    "ge": lambda x, y: make("le", as_node(y), as_node(x)),
    "ne": _unequal,
    "add": _either("or", "add"),
    "mul": _either("and", "mul"),
    "and": _either("and", "bitand"),
    "or": _either("or", "bitor"),
    "xor": _xor,
    "logical_and": _make("and"),
    "logical_or": _make("or"),
    "logical_xor": lambda x, y: make("not", make("eq", *map(_truth, (x, y)))),
    "invert": _invert,
    "pos": lambda x: as_node(x),
    "pow": _pow,
    "div": _div,
    "where": where,
    "masked_fill": _filled,
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": lambda x, min: _clamp(x, min),
    "clamp_max": lambda x, max: _clamp(x, max=max),
    "square": lambda x: _pow(x, 2),
    "reciprocal": lambda x: make("div", constant(1.0), as_node(x)),
    "relu": lambda x, inplace=False: where(FUNCTIONS["le"](as_node(x), as_node(0)), 0, x),
    "tan": lambda x: make("div", make("sin", as_node(x)), make("cos", as_node(x))),
    "silu": lambda x, inplace=False: _make("mul")(x, _make("sigmoid")(x)),
    "gelu": _gelu,
    "softplus": _softplus,
    "isneginf": lambda x: make("eq", as_node(x), constant(-math.inf)),
    "isinf": lambda x: make("eq", make("abs", as_node(x)), constant(math.inf)),
    "isnan": lambda x: _unequal(x, x),
    "float": _cast(Type.FLOAT),
    "double": _cast(Type.FLOAT),
    "int": _cast(Type.INT32),
    "long": _cast(Type.INT64),
    "bool": _cast(Type.BOOLEAN),
    "to": _to,
    **dict.fromkeys(("type", "astype", "type_as"), _astype),
    **dict.fromkeys(("contiguous", "clone", "copy"), lambda x, *_, **__: as_node(x)),
    "detach": lambda x: Node("detach", as_node(x).type, (as_node(x),)),
    "zeros_like": _new(0),
    "ones_like": _new(1),
    "full_like": _new(),
    "new_full": lambda x, _, fill, **options: _new()(x, fill, **options),
    "new_ones": lambda x, *_, **options: _new(1)(x, **options),
    "new_zeros": lambda x, *_, **options: _new(0)(x, **options),
    **dict.fromkeys(("scalar_tensor", "as_tensor", "tensor"), _to),
}
_ALIASES = {
    "abs": "absolute fabs",
    "and": "bitwise_and",
    "div": "divide true_divide truediv",
    "eq": "equal",
    "floordiv": "floor_divide",
    "ge": "greater_equal",
    "gt": "greater",
    "invert": "bitwise_not",
    "le": "less_equal",
    "lt": "less",
    "max": "maximum",
    "min": "minimum",
    "mod": "remainder",
    "mul": "multiply",
    "ne": "not_equal",
    "neg": "negative",
    "not": "logical_not",
    "or": "bitwise_or",
    "pow": "power float_power",
    "shl": "lshift left_shift bitwise_left_shift",
    "shr": "rshift right_shift bitwise_right_shift",
    "ndtr": "special_ndtr",
    "sigmoid": "expit special_expit",
    "sign": "sgn",
    "sub": "subtract",
    "xor": "bitwise_xor",
}
ALIASES = {alias: name for name, aliases in _ALIASES.items() for alias in aliases.split()}


_REFLECTED = (
    *("radd", "rsub", "rmul", "rdiv", "rtruediv", "rfloordiv", "rmod", "rpow"),
    *("rand", "ror", "rxor", "rlshift", "rrshift"),
)


def function(name: str) -> tuple[Callable[..., Node], bool]:
    """The function of a name, and whether it is one whose arguments come in the other order
    (``rsub``). Raises Untraceable."""
    if (found := FUNCTIONS.get(ALIASES.get(name, name))) is not None:
        return found, False
    if name in _REFLECTED:
        return FUNCTIONS[ALIASES.get(name[1:], name[1:])], True
    near = difflib.get_close_matches(name, [*FUNCTIONS, *ALIASES], 3)
    raise Untraceable(
        f"{name} is not a function of one element that is supported",
        f"Near: {', '.join(near)}"
        if near
        else "Use arithmetic, comparisons, where, exp, log, "
        "tanh and the like, or compute it outside, into an array",
    )
