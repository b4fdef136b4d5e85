"""Verdicts: results compared with the oracle within the bounds of ``tolerances``. Host arrays in,
one verdict out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from kernelseam.dtypes import LARGEST, DType
from kernelseam.frozen import dataclass
from kernelseam.oracle import formulas, tolerances
from kernelseam.oracle.epilogues import Epilogue
from kernelseam.oracle.formulas import Array, Floats, Rows
from kernelseam.oracle.gradients import Gradient
from kernelseam.oracle.sampled_gradients import SampledGradient


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison."""

    passed: bool
    worst: float
    """Largest error over tolerance; inf where a value is wrongly finite, or non-finite in the wrong
    place or of the wrong kind."""
    where: tuple[int, ...]
    """Index of the worst element in the array that ``message`` names."""
    checked: int
    """Elements compared."""
    message: str

    def __bool__(self) -> bool:
        return self.passed


def attention(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array | None = None,
    *,
    causal: bool,
    scale: float | None = None,
    rows: Rows | int = None,
    flushed: bool = False,
    variant: formulas.Variant = formulas.PLAIN,
    precision: str | None = None,
) -> Verdict:
    """Compare out [B,H,S_q,D_v] and lse [B,H,S_q] with softmax(scale·q·kᵀ)·v, or with a variant of
    it.

    q [B,H,S_q,D_qk], k [B,H_kv,S_k,D_qk], v [B,H_kv,S_k,D_v] as the implementation read them, any
    float dtype; ``scale`` None means 1/√D_qk. ``rows``: numbers (b·H + h)·S_q + i of the rows to
    compare, or how many to sample. ``flushed``: subnormals count as lost. ``precision``: how
    float32 was multiplied.
    """
    lead, numbers = q.shape[:3], _numbers(rows, math.prod(q.shape[:3]))
    result = formulas.attention(
        q, k, v, causal, q.shape[3] ** -0.5 if scale is None else scale, numbers, variant
    )
    return attention_verdict(
        result,
        k.shape[2],
        q.shape[3],
        DType.of(q.dtype, fp8=True),
        out,
        lse,
        lead,
        numbers,
        flushed,
        precision,
        variant.rounded_keys,
    )


def attention_verdict(
    result: formulas.AttentionResult,
    S_k: int,
    head_dim: int,
    dtype: DType,
    out: Array,
    lse: Array | None,
    lead: tuple[int, ...],
    numbers: Rows,
    flushed: bool = False,
    precision: str | None = None,
    rounded_keys: bool = False,
) -> Verdict:
    """The same, given the oracle's result."""
    tolerance, lse_tolerance = tolerances.attention(
        result,
        S_k,
        head_dim,
        dtype,
        DType.of(out.dtype),
        flushed=flushed,
        precision=precision,
        rounded_keys=rounded_keys,
    )
    compared = [_compared("out", out, result.out, tolerance)]
    if lse is not None:
        compared.append(_compared("lse", lse, result.lse, lse_tolerance))
    return _verdict(compared, lead, numbers)


def merge_states(
    outs: Array, lses: Array, out: Array, lse: Array | None = None, *, flushed: bool = False
) -> Verdict:
    """Compare out [B,H,rows,D_v] and lse [B,H,rows] with the merge of outs [N,B,H,rows,D_v] and
    lses [N,B,H,rows]."""
    result = formulas.merge_states(outs, lses)
    return merge_verdict(result, len(outs), DType.of(outs.dtype), out, lse, flushed=flushed)


def merge_verdict(
    result: formulas.MergeResult,
    parts: int,
    dtype: DType,
    out: Array,
    lse: Array | None = None,
    *,
    flushed: bool = False,
) -> Verdict:
    """The same, given the oracle's result; ``dtype`` is that of the parts."""
    tolerance, lse_tolerance = tolerances.merge_states(
        result, parts, dtype, DType.of(out.dtype), flushed=flushed
    )
    compared = [_compared("out", out, result.out, tolerance)]
    if lse is not None:
        compared.append(_compared("lse", lse, result.lse, lse_tolerance))
    return _verdict(compared, out.shape[:-1], None)


def attention_bwd(
    expected: Mapping[str, Gradient],
    dtype: DType,
    results: Mapping[str, Array],
    *,
    flushed: bool = False,
    precision: str | None = None,
) -> Verdict:
    """Compare gradients by name with the oracle's; ``dtype`` is that of q, k and v."""
    parts = [
        _compared(
            name,
            x,
            expected[name].value,
            tolerances.gradient(
                expected[name], dtype, DType.of(x.dtype), flushed=flushed, precision=precision
            ),
        )
        for name, x in results.items()
    ]
    return _verdict(parts, (), None)


def sampled_gradients(
    expected: Mapping[str, SampledGradient],
    dtype: DType,
    results: Mapping[str, Array],
    *,
    flushed: bool = False,
    precision: str | None = None,
) -> Verdict:
    """The same for some elements of each gradient; undefined elements may have any value."""
    parts = []
    for name, x in results.items():
        some, value = expected[name], expected[name].gradient.value
        bound = tolerances.gradient(
            some.gradient, dtype, DType.of(x.dtype), flushed=flushed, precision=precision
        )
        value = np.where(some.undefined, x[some.index].astype(value.dtype), value)
        parts.append(replace(_compared(name, x, value, bound), index=some.index))
    return _verdict(parts, (), None)


def projection(
    expected: Mapping[str, tuple[formulas.GemmResult, int]],
    dtype: DType,
    results: Mapping[str, Array],
    *,
    zero_mean: bool = True,
    exact: bool = False,
    flushed: bool = False,
) -> Verdict:
    """Compare a projection's results by name with the oracle's, each given with the number of its
    terms; ``dtype`` is that of the factors. The rest as in ``gemm``."""
    parts = []
    for name, x in results.items():
        result, K = expected[name]
        if exact:
            rounded = result.out.astype(x.dtype).astype(np.float64)
            parts.append(_Compared(name, x, rounded, np.zeros_like(rounded), math.inf))
        else:
            bound = tolerances.gemm(
                result, K, dtype, DType.of(x.dtype), zero_mean=zero_mean, flushed=flushed
            )
            parts.append(_compared(name, x, result.out, bound))
    return _verdict(parts, (), None)


def within(parts: Mapping[str, tuple[Array, Floats, Floats]]) -> Verdict:
    """Compare arrays by name, each with what is expected and the bound of each element."""
    return _verdict(
        [_Compared(n, *x, tolerances.overflows_at(DType.float64)) for n, x in parts.items()],
        (),
        None,
    )


def gemm(
    a: Array,
    b: Array,
    out: Array,
    c: Array | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    a_transposed: bool = False,
    b_transposed: bool = False,
    bias: Array | None = None,
    residual: Array | None = None,
    batch_group: int = 1,
    head_group: int = 1,
    rows: Rows | int = None,
    zero_mean: bool = True,
    exact: bool = False,
    flushed: bool = False,
    precision: str | None = None,
    a_scales: Array | None = None,
    b_scales: Array | None = None,
    epilogue: Epilogue | None = None,
    preactivation: Array | None = None,
    reductions: Sequence[Array] = (),
) -> Verdict:
    """Compare out [B,H,M,N] (or [B,M,N], [M,N]) with alpha·Σ op(A)·op(B) + beta·C + bias +
    residual, ``c`` being C before the call, bias [B,H,N] (or [B,N], [N]).

    ``a``, ``b``: as they lie in memory, of as many axes; b's heads may be a divisor of a's, and so,
    where products of groups of batches or heads are summed, out's batches and heads. ``rows``:
    numbers (b·H + h)·M + i, of out's batches and heads, of the rows to compare, or how many to
    sample. ``zero_mean``: see ``tolerances``. ``exact``: the oracle's value, rounded once, must be
    met bit for bit. ``flushed``: subnormals count as lost. ``precision``: how float32 was
    multiplied. ``a_scales`` [B,H,M] (or [B,M], [M]), ``b_scales`` [B,H,N]: what rows of op(A) and
    columns of op(B) are multiplied by; [B,H,M,K] and [B,H,N,K]: their elements. ``epilogue``: of
    all that; ``preactivation`` [B,H,M,N] is then compared with what it is of, and ``reductions``,
    in their order, with its sums and maxima (of all rows alone).
    """
    a4, b4, c4, added = (None if x is None else _four(x) for x in (a, b, c, residual))
    assert a4 is not None and b4 is not None
    by_column, a_scales, b_scales = (
        x if x is None or x.ndim == 4 else _four(x[..., None, :])[:, :, 0]
        for x in (bias, a_scales, b_scales)
    )
    lead, numbers = out.shape[:-1], _numbers(rows, math.prod(out.shape[:-1]))
    result = formulas.gemm(
        a4,
        b4,
        c4,
        alpha,
        beta,
        a_transposed,
        b_transposed,
        numbers,
        bias=by_column,
        residual=added,
        batch_group=batch_group,
        head_group=head_group,
        a_scales=a_scales,
        b_scales=b_scales,
    )
    K = a4.shape[2 if a_transposed else 3] * batch_group * head_group
    return gemm_verdict(
        result,
        K,
        DType.of(a.dtype, fp8=True),
        out,
        lead,
        numbers,
        zero_mean=zero_mean,
        exact=exact,
        flushed=flushed,
        precision=precision,
        epilogue=epilogue,
        preactivation=preactivation,
        reductions=reductions,
    )


def gemm_verdict(
    result: formulas.GemmResult,
    K: int,
    dtype: DType,
    out: Array,
    lead: tuple[int, ...],
    numbers: Rows,
    *,
    zero_mean: bool = True,
    exact: bool = False,
    flushed: bool = False,
    precision: str | None = None,
    epilogue: Epilogue | None = None,
    preactivation: Array | None = None,
    reductions: Sequence[Array] = (),
    places: tuple[Array, Array] | None = None,
) -> Verdict:
    """The same, given the oracle's result; ``K`` counts the terms of all products of an element.
    ``places``: what an epilogue is told of each row, its number and its matrix', where that is not
    its place in the result."""

    def tolerance(of: DType) -> Floats:
        return tolerances.gemm(
            result, K, dtype, of, zero_mean=zero_mean, flushed=flushed, precision=precision
        )

    def compared(name: str, actual: Array, expected: Floats, within: DType | Floats) -> _Compared:
        if (largest := LARGEST.get(DType.of(actual.dtype, fp8=True))) is not None:
            expected = np.clip(expected, -largest, largest)
        if exact:
            rounded = expected.astype(actual.dtype).astype(np.float64)
            return _Compared(name, actual, rounded, np.zeros_like(rounded), math.inf)
        bound = tolerance(within) if isinstance(within, DType) else within
        return _compared(name, actual, expected, bound)

    dtype_c = DType.of(out.dtype, fp8=True)
    if epilogue is None:
        return _verdict([compared("C", out, result.out, dtype_c)], lead, numbers)
    rows = np.arange(math.prod(lead)) if numbers is None else np.asarray(numbers)
    sums = result.out.reshape(len(rows), result.out.shape[-1])
    within = tolerance(dtype.accumulator).reshape(sums.shape)
    batch, m = np.divmod(rows, max(lead[-1], 1))
    expected, bound = epilogue.applied(sums, within, places or (m, batch), dtype_c, flushed)
    parts = [compared("C", out, expected, bound)]
    if preactivation is not None:
        parts.append(compared("preactivation", preactivation, result.out, dtype_c))
    verdict = _verdict(parts, lead, numbers)
    if not reductions:
        return verdict
    if numbers is not None:
        raise ValueError("sums and maxima of an epilogue are of all rows, not of some")
    extents = math.prod(lead[:-1]), lead[-1]
    of_all = epilogue.reduced(sums, within, (m, batch), extents, dtype.accumulator, flushed)
    verdicts = [verdict]
    for i, (x, (y, bound)) in enumerate(zip(reductions, of_all, strict=True)):
        part = compared(f"reduction {i}", x, y.reshape(x.shape), bound.reshape(x.shape))
        verdicts.append(_verdict([part], x.shape[:-1], None))
    worst = max(verdicts, key=lambda v: v.worst)
    return replace(worst, checked=sum(v.checked for v in verdicts))


def worst_of(verdicts: Iterable[Verdict]) -> Verdict:
    """One verdict on the groups of a product, whose message names the worst."""
    worst, checked = Verdict(True, 0.0, (), 0, "nothing to compare: there are no groups"), 0
    for g, one in enumerate(verdicts):
        checked += one.checked
        if one.worst >= worst.worst:
            worst = replace(one, where=(g, *one.where), message=f"group {g}: {one.message}")
    return replace(worst, checked=checked)


def ratios(actual: Floats, expected: Floats, tolerance: Floats, overflows: float) -> Floats:
    """Error over tolerance of every element; ``overflows``: the magnitude that the dtype rounds to
    infinity.

    NaN equals NaN alone, and an infinity itself alone. A finite value that may round past the
    largest finite number may be infinite.
    """
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        ratio: Floats = np.abs(actual - expected) / tolerance
        may_overflow = (
            np.isinf(actual)
            & (np.sign(actual) == np.sign(expected))
            & (np.abs(expected) + tolerance >= overflows)
        )
    ratio[np.isnan(ratio) | ~np.isfinite(expected)] = np.inf
    ratio[
        (actual == expected)
        | (np.isnan(actual) & np.isnan(expected))
        | (may_overflow & np.isfinite(expected))
    ] = 0
    return ratio


@dataclass(frozen=True)
class _Compared:
    """One array of a result with the expected values of its rows (all, or the sampled ones)."""

    name: str
    actual: Array
    expected: Floats
    tolerance: Floats
    overflows: float
    index: tuple[Array, ...] | None = None
    """Indices of the elements of ``actual`` that are compared, where it is not by rows."""


def _compared(name: str, actual: Array, expected: Floats, tolerance: Floats) -> _Compared:
    return _Compared(
        name, actual, expected, tolerance, tolerances.overflows_at(DType.of(actual.dtype, fp8=True))
    )


def _verdict(parts: list[_Compared], lead: tuple[int, ...], numbers: Rows) -> Verdict:
    checked, worst, message = 0, -1.0, "nothing to compare: the result is empty"
    where: tuple[int, ...] = ()
    for part in parts:
        if part.actual.shape[: len(lead)] != lead:
            raise ValueError(
                f"{part.name} has shape {part.actual.shape}, the problem's rows are {lead}"
            )
        if part.index is not None:
            actual = part.actual[part.index].astype(np.float64)
        else:
            rows = part.actual.reshape(math.prod(lead), *part.actual.shape[len(lead) :])
            actual = (rows if numbers is None else rows[np.asarray(numbers)]).astype(np.float64)
        expected, tolerance = (
            part.expected.reshape(actual.shape),
            part.tolerance.reshape(actual.shape),
        )
        ratio = ratios(actual, expected, tolerance, part.overflows)
        checked += ratio.size
        if not ratio.size or ratio.max() <= worst:
            continue
        at = np.unravel_index(int(ratio.argmax()), ratio.shape)
        worst = float(ratio[at])
        if part.index is not None:
            where = tuple(int(np.broadcast_to(n, actual.shape)[at]) for n in part.index)
        else:
            row = int(at[0]) if numbers is None else int(np.asarray(numbers)[at[0]])
            where = tuple(int(i) for i in (*np.unravel_index(row, lead), *at[1:]))
        message = (
            f"{part.name}{list(where)} is {actual[at]:.9g}, the oracle says {expected[at]:.9g}, "
            f"tolerance {tolerance[at]:.3g}: error/tolerance {worst:.3g}"
        )
    return Verdict(worst <= 1, max(worst, 0.0), where, checked, message)


def _numbers(rows: Rows | int, total: int) -> Rows:
    return formulas.sample_rows(total, rows) if isinstance(rows, int) else rows


def _four(x: Array) -> Array:
    """[M,N] → [1,1,M,N]; [B,M,N] → [B,1,M,N]."""
    return x[None, None] if x.ndim == 2 else x[:, None] if x.ndim == 3 else x
