"""The operations of expressions: each in NumPy and in device code (``kernels/tile/element.h``)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

erf = np.vectorize(math.erf, otypes=[float])
ndtr = np.vectorize(lambda x: 0.5 * math.erfc(-x * math.sqrt(0.5)), otypes=[float])


class Operation(NamedTuple):
    """``text``: in C++, with {0}, {1}, … for the arguments.

    ``rule`` says how types meet. number: the larger type, at least int32; any: the larger type;
    float: float; bits: as number; logic: bool; compare: the arguments meet and the result is bool.
    """

    numpy: Callable[..., Any]
    text: str
    rule: str = "number"
    commutes: bool = False


def _divided(divide: Callable[..., Any]) -> Callable[..., Any]:
    """Of integers, 0 where the divisor is 0, as device code has it."""

    def safe(x: Any, y: Any) -> Any:
        x, y = np.asarray(x), np.asarray(y)
        if "f" in x.dtype.kind + y.dtype.kind:
            return divide(x, y)
        return np.where(y == 0, 0, divide(x, np.where(y == 0, 1, y)))

    return safe


def _softcap(x: Any, cap: Any) -> Any:
    return cap * np.tanh(x / cap)


def _function(name: str, numpy: Callable[..., Any], count: int = 1) -> Operation:
    inputs = ", ".join(f"{{{i}}}" for i in range(count))
    return Operation(numpy, f"element_{name}({inputs})", "float")


OPERATIONS: dict[str, Operation] = {
    "add": Operation(np.add, "{0} + {1}", commutes=True),
    "sub": Operation(np.subtract, "{0} - {1}"),
    "mul": Operation(np.multiply, "{0} * {1}", commutes=True),
    "div": Operation(np.divide, "{0} / {1}", "float"),
    "floordiv": Operation(_divided(np.floor_divide), "floor_divide({0}, {1})"),
    "mod": Operation(_divided(np.mod), "floor_modulo({0}, {1})"),
    "neg": Operation(np.negative, "-{0}"),
    "abs": Operation(np.abs, "element_abs({0})"),
    "sign": Operation(np.sign, "element_sign({0})"),
    "min": Operation(np.minimum, "element_min({0}, {1})", "any", True),
    "max": Operation(np.maximum, "element_max({0}, {1})", "any", True),
    "lt": Operation(np.less, "{0} < {1}", "compare"),
    "le": Operation(np.less_equal, "{0} <= {1}", "compare"),
    "eq": Operation(np.equal, "{0} == {1}", "compare", True),
    "not": Operation(np.logical_not, "!{0}", "logic"),
    "and": Operation(np.logical_and, "{0} & {1}", "logic", True),
    "or": Operation(np.logical_or, "{0} | {1}", "logic", True),
    "bitand": Operation(np.bitwise_and, "{0} & {1}", "bits", True),
    "bitor": Operation(np.bitwise_or, "{0} | {1}", "bits", True),
    "bitxor": Operation(np.bitwise_xor, "{0} ^ {1}", "bits", True),
    "shl": Operation(np.left_shift, "{0} << {1}", "bits"),
    "shr": Operation(np.right_shift, "{0} >> {1}", "bits"),
    "where": Operation(np.where, "{0} ? {1} : {2}", "any"),
    "pow": _function("pow", np.power, 2),
    "softcap": _function("softcap", _softcap, 2),
    "erf": _function("erf", erf),
    "ndtr": _function("ndtr", ndtr),
    "sigmoid": _function("sigmoid", lambda x: 1 / (1 + np.exp(-x))),
    "rsqrt": _function("rsqrt", lambda x: 1 / np.sqrt(x)),
} | {
    name: _function(name, getattr(np, name))
    for name in ("exp", "exp2", "log", "log2", "log1p", "sqrt", "tanh", "sin", "cos", "floor")
}
