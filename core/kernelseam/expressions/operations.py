"""The operations of expressions: each in NumPy, in torch and in device code
(``kernels/tile/element.h``)."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

erf = np.vectorize(math.erf, otypes=[float])
ndtr = np.vectorize(lambda x: 0.5 * math.erfc(-x * math.sqrt(0.5)), otypes=[float])


class Operation(NamedTuple):
    """``function``: its name in NumPy and in torch, or what computes it of the library (``numpy``
    or ``torch``) and its arrays or tensors.

    ``text``: in C++, with {0}, {1}, … for the arguments.

    ``rule`` says how types meet. number: the larger type, at least int32; any: the larger type;
    float: float; bits: as number; logic: bool; compare: the arguments meet and the result is bool.
    """

    function: str | Callable[..., Any]
    text: str
    rule: str = "number"
    commutes: bool = False

    def compute(self, library: Any, *x: Any) -> Any:
        f = self.function
        return getattr(library, f)(*x) if isinstance(f, str) else f(library, *x)


def _divided(name: str) -> Callable[..., Any]:
    """Of integers, 0 where the divisor is 0, as device code has it."""

    def safe(library: Any, x: Any, y: Any) -> Any:
        divide = getattr(library, name)
        if "float" in f"{x.dtype} {y.dtype}":
            return divide(x, y)
        return library.where(y == 0, 0, divide(x, library.where(y == 0, 1, y)))

    return safe


def _function(name: str, function: str | Callable[..., Any], count: int = 1) -> Operation:
    inputs = ", ".join(f"{{{i}}}" for i in range(count))
    return Operation(function, f"element_{name}({inputs})", "float")


def _torch_only(name: str, in_numpy: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch's, and what computes it in NumPy, which has none."""
    return lambda library, x: in_numpy(x) if library is np else attrgetter(name)(library)(x)


OPERATIONS: dict[str, Operation] = {
    "add": Operation("add", "{0} + {1}", commutes=True),
    "sub": Operation("subtract", "{0} - {1}"),
    "mul": Operation("multiply", "{0} * {1}", commutes=True),
    "div": Operation("divide", "{0} / {1}", "float"),
    "floordiv": Operation(_divided("floor_divide"), "floor_divide({0}, {1})"),
    "mod": Operation(_divided("remainder"), "floor_modulo({0}, {1})"),
    "neg": Operation("negative", "-{0}"),
    "abs": Operation("abs", "element_abs({0})"),
    "sign": Operation("sign", "element_sign({0})"),
    "min": Operation("minimum", "element_min({0}, {1})", "any", True),
    "max": Operation("maximum", "element_max({0}, {1})", "any", True),
    "lt": Operation("less", "{0} < {1}", "compare"),
    "le": Operation("less_equal", "{0} <= {1}", "compare"),
    "eq": Operation(lambda _, x, y: x == y, "{0} == {1}", "compare", True),
    "not": Operation("logical_not", "!{0}", "logic"),
    "and": Operation("logical_and", "{0} & {1}", "logic", True),
    "or": Operation("logical_or", "{0} | {1}", "logic", True),
    "bitand": Operation("bitwise_and", "{0} & {1}", "bits", True),
    "bitor": Operation("bitwise_or", "{0} | {1}", "bits", True),
    "bitxor": Operation("bitwise_xor", "{0} ^ {1}", "bits", True),
    "shl": Operation(lambda _, x, y: x << y, "{0} << {1}", "bits"),
    "shr": Operation(lambda _, x, y: x >> y, "{0} >> {1}", "bits"),
    "where": Operation("where", "{0} ? {1} : {2}", "any"),
    "pow": _function("pow", lambda _, x, y: x**y, 2),
    "softcap": _function("softcap", lambda lib, x, cap: cap * lib.tanh(x / cap), 2),
    "erf": _function("erf", _torch_only("erf", erf)),
    "ndtr": _function("ndtr", _torch_only("special.ndtr", ndtr)),
    "sigmoid": _function("sigmoid", _torch_only("sigmoid", lambda x: 1 / (1 + np.exp(-x)))),
    "rsqrt": _function("rsqrt", _torch_only("rsqrt", lambda x: 1 / np.sqrt(x))),
} | {
    name: _function(name, name)
    for name in ("exp", "exp2", "log", "log2", "log1p", "sqrt", "tanh", "sin", "cos", "floor")
}
