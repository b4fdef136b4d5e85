"""``kernelseam.where`` and mathematical functions for users' functions, without torch: of what is
traced, and the same of NumPy's arrays and torch's tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np

from kernelseam.expressions.operations import erf as _erf
from kernelseam.expressions.operations import ndtr as _ndtr
from kernelseam.expressions.values import Value, call

_TORCH = {"clip": "clamp", "ndtr": "special.ndtr"}
_NUMPY: dict[str, Callable[..., Any]] = {
    "erf": _erf,
    "ndtr": _ndtr,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


def _of(name: str, *x: Any) -> Any:
    if any(isinstance(y, Value) for y in x):
        return call(name, *x)
    torch = sys.modules.get("torch")
    if torch is not None and any(isinstance(y, torch.Tensor) for y in x):
        if name in ("minimum", "maximum"):
            like = next(y for y in x if isinstance(y, torch.Tensor))
            x = tuple(torch.as_tensor(y, device=like.device) for y in x)
        return attrgetter(_TORCH.get(name, name))(torch)(*x)
    return (_NUMPY.get(name) or getattr(np, name))(*x)


def where(condition: Any, x: Any, y: Any) -> Any:
    """``x`` where ``condition`` holds, else ``y``."""
    return _of("where", condition, x, y)


def minimum(x: Any, y: Any) -> Any:
    """The smaller one; NaN where either is."""
    return _of("minimum", x, y)


def maximum(x: Any, y: Any) -> Any:
    """The larger one; NaN where either is."""
    return _of("maximum", x, y)


def clip(x: Any, low: Any, high: Any) -> Any:
    """``x`` moved into [low, high]."""
    return _of("clip", x, low, high)


def exp(x: Any) -> Any:
    return _of("exp", x)


def exp2(x: Any) -> Any:
    return _of("exp2", x)


def log(x: Any) -> Any:
    """To base e."""
    return _of("log", x)


def log2(x: Any) -> Any:
    return _of("log2", x)


def log1p(x: Any) -> Any:
    return _of("log1p", x)


def sqrt(x: Any) -> Any:
    return _of("sqrt", x)


def tanh(x: Any) -> Any:
    return _of("tanh", x)


def erf(x: Any) -> Any:
    """The error function."""
    return _of("erf", x)


def ndtr(x: Any) -> Any:
    """Φ(x), the distribution function of the standard normal distribution: (1 + erf(x/√2)) / 2
    without its cancellation."""
    return _of("ndtr", x)


def sin(x: Any) -> Any:
    return _of("sin", x)


def cos(x: Any) -> Any:
    return _of("cos", x)


def floor(x: Any) -> Any:
    return _of("floor", x)


def sigmoid(x: Any) -> Any:
    """1 / (1 + e^−x)"""
    return _of("sigmoid", x)
