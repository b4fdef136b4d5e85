"""Epilogues: what becomes of each element of a product before it is rounded and written.

A product's ``epilogue`` is a function ``(acc, m, n, batch)`` of one element, one of ``NAMED`` by
its name, ``gated(…)`` of a function of two columns, or a list of these, applied in turn. The
functions here are such functions, make such, or are of one number, for use in others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kernelseam.errors import InvalidValue
from kernelseam.expressions.elementwise import clip, ndtr, sigmoid, tanh, where
from kernelseam.expressions.epilogues import (
    HALVES,
    INTERLEAVED,
    EpilogueExpression,
    EpilogueFunction,
    traced_epilogue,
)

Activation = Callable[[Any], Any]


@dataclass(frozen=True)
class Gated:
    """An epilogue of pairs of columns: see ``gated``."""

    function: EpilogueFunction
    pairs: str = HALVES


def gated(function: EpilogueFunction, *, interleaved: bool = False) -> Gated:
    """An epilogue of pairs of columns, ``function(gate, up, m, n, batch)``: a result of half the
    width, whose column n is of the product's columns n and n + N/2, or of 2n and 2n + 1 where
    ``interleaved``."""
    return Gated(function, INTERLEAVED if interleaved else HALVES)


One = EpilogueFunction | Gated | str
Epilogue = EpilogueExpression | One | list[One] | tuple[One, ...]


# ---- activations: of one number


def relu(x: Any) -> Any:
    return where(x <= 0, 0.0, x)  # NaN stays


def gelu(x: Any) -> Any:
    """x·Φ(x), Φ as the error function has it."""
    return x * ndtr(x)


def gelu_tanh(x: Any) -> Any:
    """x·Φ(x), Φ approximated by tanh: torch's ``approximate="tanh"``. (1 + tanh(u)) / 2 is the
    sigmoid of 2u, which takes fewer instructions."""
    return x * sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x))


def silu(x: Any) -> Any:
    return x * sigmoid(x)


def quick_gelu(x: Any) -> Any:
    return x * sigmoid(1.702 * x)


# ---- epilogues that take numbers or arrays


def softcap(cap: float) -> EpilogueFunction:
    """cap·tanh(acc / cap)"""
    return partial(_softcap, cap)


def clamp(low: float, high: float) -> EpilogueFunction:
    """acc moved into [low, high]."""
    return partial(_clamp, low, high)


def row_bias(x: Any) -> EpilogueFunction:
    """acc + x[m], or x[batch, m]."""
    return _by_axis(x, "m", False)


def column_bias(x: Any) -> EpilogueFunction:
    """acc + x[n], or x[batch, n]."""
    return _by_axis(x, "n", False)


def row_factor(x: Any) -> EpilogueFunction:
    """acc·x[m], or x[batch, m]."""
    return _by_axis(x, "m", True)


def column_factor(x: Any) -> EpilogueFunction:
    """acc·x[n], or x[batch, n]."""
    return _by_axis(x, "n", True)


def factor(x: Any) -> EpilogueFunction:
    """acc·x[m, n], or x[batch, m, n]."""
    return _by_axis(x, "mn", True)


def residual(x: Any) -> EpilogueFunction:
    """acc + x[m, n], or x[batch, m, n]: after what comes before it. (A product's option
    ``residual`` is part of acc.)"""
    return _by_axis(x, "mn", False)


def quantized(scales: Any, block: tuple[int, int] | None = None) -> EpilogueFunction:
    """acc / scale, for a result of 8 bits, which is then rounded and saturated. ``scales`` float32:
    a number other than 0; [1] or [], that of all; [M] or [batch, M], those of rows; or with
    ``block`` = (m, n), the rows and columns that share one, [M / m, N / n] or
    [batch, M / m, N / n], rounded up. They are given: nothing computes them. Raises
    InvalidValue."""
    is_number = isinstance(scales, int | float) and not isinstance(scales, bool)
    shape = () if is_number else _shape("scales", scales)
    if block is not None:
        if shape == ():
            raise InvalidValue(
                "block",
                block,
                "goes with scales of blocks, and there is one of all",
                "Leave it out",
            )
        return partial(_over_block, scales, *_block(block), _is_batched(scales, "M / m", "N / n"))
    if is_number:
        if not _is_float32_factor(scales):
            raise InvalidValue(
                "scales", scales, "must be finite and not 0: acc is divided by it", "Give a scale"
            )
        return partial(_over_number, float(scales))
    if shape == ():
        scales, shape = scales.reshape(1), (1,)
    if shape == (1,):
        return partial(_over_all, scales)
    return partial(_over_row, scales, _is_batched(scales, "M"))


def _is_float32_factor(x: float) -> bool:
    """Whether a number is finite and not 0 in float32, in which results are divided."""
    try:
        with np.errstate(over="ignore", under="ignore"):
            y = float(np.float32(x))
    except OverflowError:
        return False
    return y != 0 and math.isfinite(y)


def _block(block: Any) -> tuple[int, int]:
    """(rows, columns), checked. Not by the descriptors' checks: these are built on epilogues."""
    sizes = block if isinstance(block, list | tuple) else ()
    if len(sizes) != 2 or not all(
        isinstance(n, int | np.integer) and not isinstance(n, bool) and n >= 1 for n in sizes
    ):
        raise InvalidValue(
            "block", block, "must be (rows, columns), integers of at least 1", "Give (1, 128)"
        )
    rows, columns = sizes
    return int(rows), int(columns)


def _shape(field: str, x: Any) -> tuple[int, ...]:
    if isinstance(x, bool) or not hasattr(x, "shape"):
        raise InvalidValue(
            field,
            f"a {type(x).__name__}",
            "must be an array" + ", or a number" * (field == "scales"),
            "Make it one with numpy.asarray or torch.as_tensor",
        )
    return tuple(x.shape)


def _is_batched(x: Any, *axes: str) -> bool:
    rank, named = len(_shape("epilogue", x)), ", ".join(axes)
    if rank not in (len(axes), len(axes) + 1):
        raise InvalidValue(
            "epilogue",
            f"an array of shape {list(x.shape)}",
            f"must be [{named}] or [batch, {named}]",
            "Add or remove axes with reshape, or write it as a function of its own",
        )
    return rank > len(axes)


def _by_axis(x: Any, axes: str, multiplies: bool) -> EpilogueFunction:
    return partial(_with_array, x, _is_batched(x, *axes), axes, multiplies)


# Partials of functions of modules, not closures: torch's compiler reads what such are made of, also
# where they are made in what it compiles.


def _softcap(cap: Any, acc: Any, m: Any, n: Any, batch: Any) -> Any:
    return cap * tanh(acc / cap)


def _clamp(low: Any, high: Any, acc: Any, m: Any, n: Any, batch: Any) -> Any:
    return clip(acc, low, high)


def _with_array(
    x: Any, batched: bool, axes: str, multiplies: bool, acc: Any, m: Any, n: Any, batch: Any
) -> Any:
    at = {"m": m, "n": n}
    y = x[(*((batch,) if batched else ()), *(at[axis] for axis in axes))]
    return acc * y if multiplies else acc + y


# What depends on a row alone is computed once for a row, so its reciprocal is taken there.


def _over_number(scale: Any, acc: Any, m: Any, n: Any, batch: Any) -> Any:
    return acc * (1.0 / scale)


def _over_all(scales: Any, acc: Any, m: Any, n: Any, batch: Any) -> Any:
    return acc * (1.0 / scales[0])


def _over_row(scales: Any, batched: bool, acc: Any, m: Any, n: Any, batch: Any) -> Any:
    return acc * (1.0 / (scales[batch, m] if batched else scales[m]))


def _over_block(
    scales: Any, rows: Any, columns: Any, batched: bool, acc: Any, m: Any, n: Any, batch: Any
) -> Any:
    at = m // rows, n // columns
    return acc / (scales[(batch, *at)] if batched else scales[at])


def _activation(function: Activation) -> EpilogueFunction:
    return lambda acc, m, n, batch: function(acc)


def _gate(function: Activation) -> Gated:
    return gated(lambda gate, up, m, n, batch: function(gate) * up)


ACTIVATIONS: Mapping[str, Activation] = {
    f.__name__: f for f in (relu, gelu, gelu_tanh, silu, quick_gelu)
}
NAMED: Mapping[str, EpilogueFunction | Gated] = {
    **{name: _activation(f) for name, f in ACTIVATIONS.items()},
    "reglu": _gate(relu),
    "geglu": _gate(gelu),
    "geglu_tanh": _gate(gelu_tanh),
    "swiglu": _gate(silu),
}
"""Epilogues by name. Gates are of the first half of the columns."""


def epilogue_expression(epilogue: Epilogue) -> EpilogueExpression:
    """An epilogue, or several in turn, traced. Raises InvalidValue for what is none."""
    if isinstance(epilogue, EpilogueExpression):
        return epilogue
    one = as_one(epilogue)
    return traced_epilogue(one.function, one.pairs)


def as_one(epilogue: Epilogue) -> Gated:
    """An epilogue, or several in turn, as one function, of single elements where ``pairs`` is "".
    Raises InvalidValue."""
    given: list[Any] = list(epilogue) if isinstance(epilogue, list | tuple) else [epilogue]
    parts: list[Any] = [_named(x) if isinstance(x, str) else x for x in given]
    if not parts or any(isinstance(x, Gated) for x in parts[1:]):
        raise InvalidValue(
            "epilogue",
            epilogue,
            "a list of epilogues must have one, and at most the first may be gated",
            "Put the gate first, or write one function",
        )
    first, *others = parts
    pairs = first.pairs if isinstance(first, Gated) else ""
    function = first.function if isinstance(first, Gated) else first
    if others:
        function = _in_turn(function, tuple(others), bool(pairs))
    return Gated(function, pairs)


def _named(name: str) -> EpilogueFunction | Gated:
    if name not in NAMED:
        raise InvalidValue(
            "epilogue", name, f"must be one of {', '.join(NAMED)}", "Or give a function"
        )
    return NAMED[name]


def _in_turn(
    first: EpilogueFunction, others: tuple[EpilogueFunction, ...], of_pairs: bool
) -> EpilogueFunction:
    def of_sum(acc: Any, m: Any, n: Any, batch: Any) -> Any:
        acc = first(acc, m, n, batch)
        for function in others:
            acc = function(acc, m, n, batch)
        return acc

    def of_pair(gate: Any, up: Any, m: Any, n: Any, batch: Any) -> Any:
        acc = first(gate, up, m, n, batch)
        for function in others:
            acc = function(acc, m, n, batch)
        return acc

    return of_pair if of_pairs else of_sum
