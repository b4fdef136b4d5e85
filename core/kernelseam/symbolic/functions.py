"""Functions of numbers that a trace records as one step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, TypeVar, cast

from kernelseam.symbolic.symbol import Symbol, value_of
from kernelseam.symbolic.trace import Trace

F = TypeVar("F", bound=Callable[..., Any])
_KEPT = 1024
"""Results of a recorded function: extents come again, in one call and in the next."""


def recorded(function: F) -> F:
    """A function of numbers without side effects, of which a trace records the call alone, not what
    it does. Its result is one number, of the same type for all."""
    name, kept = function.__name__, lru_cache(_KEPT)(function)

    def call(*numbers: Any) -> Any:
        trace = _trace_of(numbers)
        if trace is None:
            return function(*numbers)
        plain = [trace.plain(x) for x in numbers]
        value = function(*map(value_of, plain))
        if _trace_of(plain) is None:
            return value
        trace.namespace[name] = kept
        return trace.step(name, f"{name}({', '.join(['{}'] * len(plain))})", value, plain)

    return cast(F, call)


def least(x: int, y: int) -> int:
    """The smaller of two integers."""
    kinds: tuple[Any, ...] = type(x), type(y)
    return _chosen("min", min, x, y) if Symbol in kinds else min(x, y)


def most(x: int, y: int) -> int:
    """The larger of two integers."""
    kinds: tuple[Any, ...] = type(x), type(y)
    return _chosen("max", max, x, y) if Symbol in kinds else max(x, y)


def _chosen(name: str, choose: Callable[..., Any], x: Any, y: Any) -> Any:
    trace: Any = _trace_of((x, y))
    x, y = trace.plain(x), trace.plain(y)
    (a, b), (c, d) = trace.range(x), trace.range(y)
    if b <= c or d <= a:  # known without their values
        return (x if b <= c else y) if name == "min" else (y if b <= c else x)
    sign = "<" if name == "min" else ">"
    form = f"{{0}} if {{0}} {sign} {{1}} else {{1}}"
    result = trace.step(name, form, choose(value_of(x), value_of(y)), (x, y))
    trace.know(result, (choose(a, c), choose(b, d)))
    return result


def _trace_of(numbers: Iterable[Any]) -> Trace | None:
    for x in numbers:
        if type(x) is Symbol:
            trace: Trace = x.trace
            return trace
    return None


def as_float(x: Any) -> float:
    """``float(x)``."""
    if type(x) is not Symbol:
        return float(x)
    return cast(float, x if type(x.value) is float else x.trace.arithmetic("float", (x,)))
