"""Epilogues: functions that are applied to each element of a product before it is rounded and
written.

A product's ``epilogue`` is a function ``(acc, m, n, batch)`` of one element, one of ``NAMED`` by
its name, ``gated(…)`` of a function of two columns, or a list of these, applied in order. The
functions of this module are such functions, return such functions (``softcap``, ``residual``, …),
or are functions of one number for use in others. A list may also have sums and maxima of the
element as it is at that point: ``row_sums``, ``column_sums`` and ``amax``, each with the array that
it is written to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
    Reduced,
    reduced_epilogue,
    traced_epilogue,
)
from kernelseam.expressions.reductions import MAXIMUM, SUM
from kernelseam.frozen import dataclass

Activation = Callable[[Any], Any]


@dataclass(frozen=True)
class Gated:
    """An epilogue of pairs of columns: see ``gated``."""

    function: EpilogueFunction
    pairs: str = HALVES


def gated(function: EpilogueFunction, *, interleaved: bool = False) -> Gated:
    """An epilogue of pairs of columns, ``function(gate, up, m, n, batch)``. The result has half the
    product's columns: column n is made of the product's columns n and n + N/2, or 2n and 2n + 1 if
    ``interleaved``."""
    return Gated(function, INTERLEAVED if interleaved else HALVES)


@dataclass(frozen=True, eq=False)
class Reduce:
    """A sum or a maximum in an epilogue: see ``row_sums``, ``column_sums`` and ``amax``."""

    out: Any
    operation: str
    rows: int
    """How many rows, and columns, share one element of ``out``; 0: all."""
    columns: int
    batched: bool
    function: EpilogueFunction | None


One = EpilogueFunction | Gated | Reduce | str
Epilogue = EpilogueExpression | One | list[One] | tuple[One, ...]


# ---- activations: of one number


def relu(x: Any) -> Any:
    return where(x <= 0, 0.0, x)  # NaN stays


def gelu(x: Any) -> Any:
    """x·Φ(x), with Φ computed from the error function."""
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
    if isinstance(cap, int | float) and not 0 < cap < math.inf:
        raise InvalidValue("cap", cap, "must be greater than 0, and finite", "Leave softcap out")
    return partial(_softcap, cap)


def clamp(low: float, high: float) -> EpilogueFunction:
    """acc moved into [low, high]."""
    numbers = isinstance(low, int | float) and isinstance(high, int | float)
    if numbers and not low <= high:
        raise InvalidValue("low", low, f"must not exceed high = {high}", "Give (low, high)")
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
    [batch, M / m, N / n], rounded up. They are given; ``amax`` writes what the next ones are made
    of. Raises InvalidValue."""
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


# ---- sums and maxima


def row_sums(out: Any, function: EpilogueFunction | None = None) -> Reduce:
    """Sums along each row into ``out`` [M], over all matrices, or [batch, M]: of the element, or of
    ``function(acc, m, n, batch)`` of it. The squares of an RMS norm are those of acc·acc."""
    return Reduce(out, SUM, 1, 0, _is_batched(out, "M", field="row_sums"), function)


def column_sums(out: Any, function: EpilogueFunction | None = None) -> Reduce:
    """Sums along each column into ``out`` [N], over all matrices, or [batch, N]: of the element, or
    of ``function(acc, m, n, batch)`` of it. The gradient of a bias is one."""
    return Reduce(out, SUM, 0, 1, _is_batched(out, "N", field="column_sums"), function)


def amax(
    out: Any,
    function: EpilogueFunction | None = None,
    *,
    block: tuple[int, int] | None = None,
) -> Reduce:
    """The largest absolute value of the element, or of ``function(acc, m, n, batch)`` of it, into
    ``out``, of the shapes that ``quantized`` has for scales: [1] or [], that of all; [M] or
    [batch, M], those of rows; or with ``block`` = (m, n), the rows and columns that share one,
    [M / m, N / n] or [batch, M / m, N / n], rounded up. 0 where there are no elements; NaN where
    one of them is NaN."""
    shape = _shape("amax", out)
    if block is not None:
        rows, columns = _block(block)
        batched = _is_batched(out, "M / m", "N / n", field="amax")
        return Reduce(out, MAXIMUM, rows, columns, batched, function)
    if shape in ((), (1,)):
        return Reduce(out if shape else out.reshape(1), MAXIMUM, 0, 0, False, function)
    return Reduce(out, MAXIMUM, 1, 0, _is_batched(out, "M", field="amax"), function)


def _is_float32_factor(x: float) -> bool:
    """Whether a number, converted to float32, is finite and not 0, so that results can be divided
    by it."""
    try:
        with np.errstate(over="ignore", under="ignore"):
            y = float(np.float32(x))
    except OverflowError:
        return False
    return y != 0 and math.isfinite(y)


def _block(block: Any) -> tuple[int, int]:
    """(rows, columns), validated here, because the descriptors' validation imports this module."""
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


def _is_batched(x: Any, *axes: str, field: str = "epilogue") -> bool:
    rank, named = len(_shape(field, x)), ", ".join(axes)
    if rank not in (len(axes), len(axes) + 1):
        raise InvalidValue(
            field,
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
"""Epilogues by name. Of gated ones the gate is the first half of the columns."""


def epilogue_expression(epilogue: Epilogue) -> EpilogueExpression:
    """An epilogue, or a list of them, traced. Raises InvalidValue for a value that is none."""
    if isinstance(epilogue, EpilogueExpression):
        return epilogue
    first, reduced = stages(epilogue)
    if not reduced:
        one = as_one(epilogue)
        return traced_epilogue(one.function, one.pairs)
    before = as_one(first) if first else None
    parts = [
        Reduced(
            r.operation,
            r.rows,
            r.columns,
            r.batched,
            r.function,
            as_one(rest).function if rest else None,
        )
        for r, rest in reduced
    ]
    results = [r.out for r, _ in reduced]
    if before is None:
        return reduced_epilogue(None, "", parts, results)
    return reduced_epilogue(before.function, before.pairs, parts, results)


def stages(epilogue: Epilogue) -> tuple[list[Any], list[tuple[Reduce, list[Any]]]]:
    """(the functions before the first reduction, each reduction with the functions up to the next
    one). Raises InvalidValue for a gate behind a reduction."""
    parts: list[Any] = list(epilogue) if isinstance(epilogue, list | tuple) else [epilogue]
    first: list[Any] = []
    reduced: list[tuple[Reduce, list[Any]]] = []
    for x in parts:
        if isinstance(x, Reduce):
            reduced.append((x, []))
        else:
            (reduced[-1][1] if reduced else first).append(x)
    if any(
        isinstance(_named(x) if isinstance(x, str) else x, Gated) for _, r in reduced for x in r
    ):
        raise _refused_list(epilogue)
    return first, reduced


def reduces(epilogue: Epilogue) -> bool:
    """Whether an epilogue has sums or maxima."""
    if isinstance(epilogue, EpilogueExpression):
        return bool(epilogue.structure.reductions)
    parts = epilogue if isinstance(epilogue, list | tuple) else [epilogue]
    return any(isinstance(x, Reduce) for x in parts)


def without_reductions(epilogue: Epilogue) -> Epilogue:
    """The epilogue without its sums and maxima. Raises InvalidValue."""
    first, reduced = stages(epilogue)
    return [*first, *(x for _, rest in reduced for x in rest)] or _identity


def _identity(acc: Any, m: Any, n: Any, batch: Any) -> Any:
    return acc


def refused_reductions() -> InvalidValue:
    """The error for reductions where only functions are supported."""
    return InvalidValue(
        "epilogue",
        "row_sums, column_sums or amax",
        "is of bmm and matmul2d, where torch does not compile, trace or transform the call",
        "Leave it out, and reduce the result",
    )


def _refused_list(epilogue: Epilogue) -> InvalidValue:
    return InvalidValue(
        "epilogue",
        epilogue,
        "a list of epilogues must have one, and at most the first may be gated",
        "Put the gate first, or write one function",
    )


def as_one(epilogue: Epilogue) -> Gated:
    """An epilogue, or a list of them, as one function; of single elements where ``pairs`` is "".
    Raises InvalidValue, also for reductions, which a function cannot write."""
    given: list[Any] = list(epilogue) if isinstance(epilogue, list | tuple) else [epilogue]
    if reduces(epilogue):
        raise refused_reductions()
    parts: list[Any] = [_named(x) if isinstance(x, str) else x for x in given]
    if not parts or any(isinstance(x, Gated) for x in parts[1:]):
        raise _refused_list(epilogue)
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
