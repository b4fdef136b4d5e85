"""Epilogues by name: cases refer to them. Over NumPy's arrays, seeded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kernelseam import epilogues as e
from kernelseam.epilogues import NAMED, Epilogue, as_one
from kernelseam.expressions.elementwise import exp2, where
from kernelseam.expressions.reductions import MAXIMUM
from kernelseam.oracle import epilogues as oracle
from kernelseam.samples.files import function_in


class Extents(NamedTuple):
    """Of the product that they are for; N is the result's columns."""

    results: int
    M: int
    N: int


def _drawn(*shape: int) -> Any:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def softcap(x: Extents) -> Epilogue:
    return e.softcap(2.5)


def clamp(x: Extents) -> Epilogue:
    return e.clamp(-1.5, 2.0)


def row_bias(x: Extents) -> Epilogue:
    return e.row_bias(_drawn(x.M))


def column_bias(x: Extents) -> Epilogue:
    return e.column_bias(_drawn(x.results, x.N).astype(np.float16))


def row_factor(x: Extents) -> Epilogue:
    return e.row_factor(_drawn(x.results, x.M))


def column_factor(x: Extents) -> Epilogue:
    return e.column_factor(_drawn(x.N).astype(np.float16))


def factor(x: Extents) -> Epilogue:
    return e.factor(_drawn(x.M, x.N))


def residual(x: Extents) -> Epilogue:
    return ["gelu", e.residual(_drawn(x.results, x.M, x.N).astype(np.float16))]


def in_turn(x: Extents) -> Epilogue:
    """As cuBLASLt's, and more behind it."""
    return (e.column_bias(_drawn(x.N)), "gelu_tanh", e.column_factor(_drawn(x.N)), e.clamp(-4, 4))


def checkerboard(x: Extents) -> Epilogue:
    return lambda acc, m, n, batch: where((m + n + batch) % 2 == 0, acc * 0.5, -acc)


def powers(x: Extents) -> Epilogue:
    """Numbers as arguments; integers that tiles, rows and columns have."""
    up, step = 1.5, 3
    rows = np.arange(x.M, dtype=np.int32) % 5
    return lambda acc, m, n, batch: acc * exp2(rows[m] - n % step) + up * (batch // step)


def gated_options(x: Extents) -> Epilogue:
    factors, bias, low = _drawn(x.N), _drawn(x.results, x.M), -2.0

    def gate(gate: Any, up: Any, m: Any, n: Any, batch: Any) -> Any:
        return where(gate > low, e.silu(gate), 0.0) * (up + bias[batch, m]) * factors[n]

    return [e.gated(gate), e.residual(_drawn(x.M, x.N))]


def swiglu_interleaved(x: Extents) -> Epilogue:
    return e.gated(lambda gate, up, m, n, batch: e.silu(gate) * up, interleaved=True)


def interleaved_options(x: Extents) -> Epilogue:
    bias, shift = _drawn(x.M, x.N), 0.25
    return e.gated(
        lambda gate, up, m, n, batch: e.gelu(gate) * (up + shift) + bias[m, n], interleaved=True
    )


def _scales(*shape: int) -> Any:
    return np.exp2(_drawn(*shape) - 2).astype(np.float32)


def quantized(x: Extents) -> Epilogue:
    return e.quantized(0.25)


def quantized_tensor(x: Extents) -> Epilogue:
    return ["relu", e.quantized(_scales(1))]


def quantized_rows(x: Extents) -> Epilogue:
    return ["silu", e.quantized(_scales(x.results, x.M))]


def quantized_blocks(x: Extents) -> Epilogue:
    return e.quantized(_scales(-(-x.M // 2), -(-x.N // 128)), (2, 128))


def quantized_gate(x: Extents) -> Epilogue:
    return ["swiglu", e.quantized(_scales(x.M))]


EPILOGUES: dict[str, Callable[[Extents], Epilogue]] = {
    f.__name__: f
    for f in (
        *(softcap, clamp, row_bias, column_bias, row_factor, column_factor, factor, residual),
        *(in_turn, checkerboard, powers, gated_options, swiglu_interleaved, interleaved_options),
        *(quantized, quantized_tensor, quantized_rows, quantized_blocks, quantized_gate),
    )
}


class Reduced(NamedTuple):
    """A sum or a maximum in an epilogue: the shape of its array, and what makes it of an array."""

    shape: tuple[int, ...]
    into: Callable[[Any], e.Reduce]


def _squares(acc: Any, m: Any, n: Any, batch: Any) -> Any:
    return acc * acc


def row_sums(x: Extents) -> Reduced:
    return Reduced((x.M,), e.row_sums)


def row_squares(x: Extents) -> Reduced:
    return Reduced((x.results, x.M), lambda out: e.row_sums(out, _squares))


def column_sums(x: Extents) -> Reduced:
    return Reduced((x.N,), e.column_sums)


def column_products(x: Extents) -> Reduced:
    other, shift = _drawn(x.M, x.N), 0.5
    return Reduced(
        (x.results, x.N),
        lambda out: e.column_sums(out, lambda acc, m, n, batch: acc * other[m, n] + shift * batch),
    )


def amax(x: Extents) -> Reduced:
    return Reduced((1,), e.amax)


def amax_rows(x: Extents) -> Reduced:
    return Reduced((x.results, x.M), e.amax)


def amax_blocks(x: Extents) -> Reduced:
    return Reduced((x.M, -(-x.N // 128)), lambda out: e.amax(out, block=(1, 128)))


def amax_squares(x: Extents) -> Reduced:
    shape = (x.results, -(-x.M // 128), -(-x.N // 128))
    return Reduced(shape, lambda out: e.amax(out, _squares, block=(128, 128)))


def amax_small_squares(x: Extents) -> Reduced:
    shape = (-(-x.M // 16), -(-x.N // 16))
    return Reduced(shape, lambda out: e.amax(out, block=(16, 16)))


REDUCTIONS: dict[str, Callable[[Extents], Reduced]] = {
    f.__name__: f
    for f in (
        *(row_sums, row_squares, column_sums, column_products),
        *(amax, amax_rows, amax_blocks, amax_squares, amax_small_squares),
    )
}


def for_oracle(epilogue: Epilogue) -> oracle.Epilogue:
    """As the oracle takes one."""
    before, reduced = e.stages(epilogue)
    found = []
    for one, rest in reduced:
        function = as_one([*before, one.function or _same]).function
        is_maximum = one.operation == MAXIMUM
        found.append(oracle.Reduction(function, is_maximum, one.rows, one.columns, one.batched))
        before = [*before, *rest]
    whole = as_one(e.without_reductions(epilogue))
    return oracle.Epilogue(whole.function, whole.pairs, tuple(found))


def _same(acc: Any, m: Any, n: Any, batch: Any) -> Any:
    return acc


def epilogue_named(name: str, extents: Extents) -> Epilogue:
    """One of a name, of ours or of those here; or of a file, FILE:NAME. Raises InvalidValue."""
    if name in EPILOGUES:
        return EPILOGUES[name](extents)
    return function_in("--epilogue", name, "epilogues.py:mine") if ":" in name else name


PAIRS = frozenset(n for n, x in NAMED.items() if isinstance(x, e.Gated)) | {
    *("gated_options", "swiglu_interleaved", "interleaved_options", "quantized_gate")
}
"""Those of pairs of columns."""


def is_of_pairs(name: str) -> bool:
    """Whether an epilogue is, of a name or of a file."""
    return name in PAIRS or (":" in name and bool(as_one(epilogue_named(name, _ONE)).pairs))


_ONE = Extents(1, 1, 1)
