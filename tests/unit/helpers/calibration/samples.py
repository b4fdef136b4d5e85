"""Random problems through the reference and through the tile model: which constant of
``tolerances`` each would need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from kernelseam.descriptors import Attention, AttentionBwd, BatchedGemmStrided, QkvProjection
from kernelseam.dtypes import DType
from kernelseam.oracle import check, formulas, tolerances
from kernelseam.oracle.formulas import Array, Floats
from kernelseam.oracle.gradients import Gradient, attention_bwd
from kernelseam.oracle.projections import qkv_projection
from kernelseam.planning import plan
from kernelseam.samples.data import attention as attention_data

from calibration import guarded_softmax, stored_keys, stored_queries, tile_model, tile_model_bwd
from calibration.data import differentiated, outgrowing, scored

DTYPES = (DType.float16, DType.bfloat16, DType.float32, DType.float64)
HEAD_DIMS = (16, 40, 64, 128, 256)
KINDS = ("normal", "ramp", "positive", "extreme", "climbing")
SIZES = (1.0, 2.0**-12)
"""Scales of a GEMM's operands: with the smaller one, results are subnormal in float16."""


@dataclass(frozen=True)
class Sample:
    """One problem on one implementation."""

    kind: str
    needed: float
    """The smallest sufficient constant."""
    ratio: float
    """Error over tolerance with the constant in use."""


def attention_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """One random attention head, through both implementations (the tile model has no float64)."""
    dtype, kind, D = (
        rng.choice(np.array(DTYPES, object)),
        str(rng.choice(KINDS)),
        int(rng.choice(HEAD_DIMS)),
    )
    S_q, S_k = int(rng.integers(1, 33)), int(2 ** rng.uniform(0, 12))
    causal = bool(rng.integers(2))
    q, k, v = (rng.standard_normal((n, D)) for n in (S_q, S_k, S_k))
    if kind == "positive":
        q, k, v = np.abs(q), np.abs(k), np.abs(v)
    elif kind == "ramp":
        attention_data.ramp(q, k)
    else:
        attention_data.shape_scores(q, k, kind)
    q, k, v = (x.astype(dtype.numpy)[None, None] for x in (q, k, v))
    want = formulas.attention(q, k, v, causal, D**-0.5)
    out, lse = np.empty_like(q), np.empty((1, 1, S_q), dtype.accumulator.numpy)
    descriptor = Attention.from_arrays(q, k, v, out, lse, causal=causal)
    plan(descriptor, backend="numpy").bind()()
    yield _judge_attention(f"reference {dtype}", want, out, lse, S_k, D, dtype)
    if dtype is DType.float64:
        return
    with np.errstate(all="ignore"):
        o, row = tile_model.attention(
            q[0, 0], k[0, 0], v[0, 0], causal, D**-0.5, exp2=_hardware(rng)
        )
    yield _judge_attention(
        f"tile model {dtype}", want, o[None, None], row[None, None], S_k, D, dtype
    )


def _hardware(rng: np.random.Generator) -> Callable[[tile_model.Single], tile_model.Single]:
    return lambda x: np.exp2(x) * (1 + rng.uniform(-1, 1, x.shape) * 2.0**-22).astype(np.float32)


def variant_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """One random attention head with changed scores, through both implementations."""
    x = scored(rng)
    S_q, D = x.q.shape
    dtype, (q, k, v) = DType.of(x.q.dtype), (y[None, None] for y in (x.q, x.k, x.v))
    want = formulas.attention(q, k, v, False, D**-0.5, None, x.variant)
    out, lse = np.empty_like(q), np.empty((1, 1, S_q), np.float32)
    plan(Attention.from_arrays(q, k, v, out, lse, **x.options), backend="numpy").bind()()
    yield _judge_attention(f"reference {dtype}, changed scores", want, out, lse, len(x.k), D, dtype)
    with np.errstate(all="ignore"):
        o, row = tile_model.attention(x.q, x.k, x.v, False, D**-0.5, changes=x.changes)
    result = o[None, None], row[None, None]
    yield _judge_attention(f"tile model {dtype}, changed scores", want, *result, len(x.k), D, dtype)


def stored_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """One random attention head over keys and values of 8 bits, through both implementations."""
    x, causal = stored_keys.drawn(rng), bool(rng.integers(2))
    (S_q, D), S_k, dtype = x.q.shape, len(x.k), DType.of(x.q.dtype)
    q, k, v = (y[None, None] for y in (x.q, x.k, x.v))
    want = formulas.attention(q, k, v, causal, D**-0.5, None, x.variant)
    out, lse = np.empty_like(q), np.empty((1, 1, S_q), np.float32)
    scales: dict[str, Any] = {
        f"{n}_scales": y[None, None, :: x.block].copy()
        for n, y in (("k", x.k_scales), ("v", x.v_scales))
    }
    operands = (q, k, v, out, lse)
    descriptor = Attention.from_arrays(*operands, causal=causal, **scales, scale_block=x.block)
    plan(descriptor, backend="numpy").bind()()
    yield _judge_attention(f"reference {dtype}, keys of 8 bits", want, out, lse, S_k, D, dtype)
    with np.errstate(all="ignore"):
        o, row = stored_keys.attention(x, causal, D**-0.5, exp2=_hardware(rng))
    result = o[None, None], row[None, None]
    yield _judge_attention(f"tile model {dtype}, keys of 8 bits", want, *result, S_k, D, dtype)


def query_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """One random attention head whose q, k and v are of 8 bits, through both implementations."""
    x, causal = stored_queries.drawn(rng), bool(rng.integers(2))
    (S_q, D), S_k, dtype = x.q.shape, len(x.k), DType.of(x.q.dtype, stored=True)
    q, k, v = (y[None, None] for y in (x.q, x.k, x.v))
    want = formulas.attention(q, k, v, causal, D**-0.5, None, x.variant)
    out, lse = np.empty(q.shape, DType.bfloat16.numpy), np.empty((1, 1, S_q), np.float32)
    scales: dict[str, Any] = {
        f"{n}_scales": np.full((1, 1), y, np.float32) for n, y in zip("qkv", x.scales, strict=True)
    }
    result = Attention.from_arrays(q, k, v, out, lse, causal=causal, **scales)
    plan(result, backend="numpy").bind()()
    yield _judge_attention(f"reference {dtype}", want, out, lse, S_k, D, dtype)
    with np.errstate(all="ignore"):
        o, row = stored_queries.attention(x, causal, D**-0.5, exp2=_hardware(rng))
    yield _judge_attention(
        f"tile model {dtype}", want, o[None, None], row[None, None], S_k, D, dtype
    )


def guarded_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """One random 16-bit attention head through the model of the softmax that rescales by sums."""
    x = outgrowing(rng)
    D, dtype = x.q.shape[1], DType.of(x.q.dtype)
    variant = formulas.Variant(x.window, softcap=x.softcap, sinks=np.array([x.sink]))
    q, k, v = (y[None, None] for y in (x.q, x.k, x.v))
    want = formulas.attention(q, k, v, x.causal, D**-0.5, None, variant)
    with np.errstate(all="ignore"):
        o, row = guarded_softmax.attention(
            x.q,
            x.k,
            x.v,
            x.causal,
            D**-0.5,
            exp2=_hardware(rng),
            window=x.window,
            softcap=x.softcap,
            sink=x.sink,
        )
    yield _judge_attention(
        f"guarded tile model {dtype}", want, o[None, None], row[None, None], len(x.k), D, dtype
    )


def _judge_attention(
    who: str, want: formulas.AttentionResult, out: Array, lse: Array, S_k: int, D: int, dtype: DType
) -> Sample:
    growth = dtype.accumulator.unit_roundoff * (
        np.sqrt(S_k) + np.sqrt(D) * want.products + want.changes
    )
    bound, lse_bound = tolerances.attention(want, S_k, D, dtype, DType.of(out.dtype))
    constant = tolerances.ATTENTION_CONSTANT
    needed = max(
        _needed(
            out,
            want.out,
            bound - constant * growth[..., None] * want.pv,
            growth[..., None] * want.pv,
        ),
        _needed(lse, want.lse, np.zeros_like(want.lse), lse_bound / constant),
    )
    verdict = check.attention_verdict(want, S_k, D, dtype, out, lse, out.shape[:-1], None)
    return Sample("attention " + who, needed, verdict.worst)


def gradient_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """One random attention of two heads that share keys, its gradients through both
    implementations."""
    x = differentiated(rng)
    dtype, arrays = DType.of(x.arrays["q"].dtype), x.arrays
    shape = None if x.variant.bias is None else x.variant.bias.shape
    q, k, v, dout = (arrays[n] for n in ("q", "k", "v", "dout"))
    want = attention_bwd(q, k, v, dout, x.causal, x.scale, x.variant, shape)
    empty: dict[str, Any] = {
        n: np.empty_like(arrays[n[1:]] if n != "dsinks" else x.variant.sinks) for n in want
    }
    plan(AttentionBwd(forward=x.forward, dout=dout, **empty), backend="numpy").bind()()
    changed = ", changed scores" if x.variant is not formulas.PLAIN else ""
    yield _judge_gradients(f"reference {dtype}{changed}", want, empty, dtype)
    if dtype is not DType.float64:
        with np.errstate(all="ignore"):
            gradients = tile_model_bwd.attention_bwd(arrays, x.causal, x.scale, x.variant, shape)
        yield _judge_gradients(f"tile model {dtype}{changed}", want, gradients, dtype)


def _judge_gradients(
    who: str, expected: Mapping[str, Gradient], gradients: Mapping[str, Array], dtype: DType
) -> Sample:
    constant, needed = tolerances.ATTENTION_CONSTANT, 0.0
    for name, g in expected.items():
        unit = dtype.accumulator.unit_roundoff * (g.single + g.lses)
        bound = tolerances.gradient(g, dtype, DType.of(gradients[name].dtype))
        needed = max(needed, _needed(gradients[name], g.value, bound - constant * unit, unit))
    return Sample(
        "attention gradients " + who, needed, check.attention_bwd(expected, dtype, gradients).worst
    )


def gemm_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """One random GEMM, through both implementations."""
    dtype, positive = rng.choice(np.array(DTYPES, object)), bool(rng.integers(2))
    dtype_c = dtype if rng.integers(2) else dtype.accumulator
    M, N, K = int(rng.integers(1, 33)), int(rng.integers(1, 33)), int(2 ** rng.uniform(0, 12))
    draw, size = rng.random if positive else rng.standard_normal, float(rng.choice(SIZES))
    a, b = ((size * draw(s)).astype(dtype.numpy) for s in ((M, K), (K, N)))
    c = (size * draw((M, N))).astype(dtype_c.numpy)
    alpha, beta = rng.choice([1.0, -0.3, 2.5]), rng.choice([0.0, 1.0, -0.7])
    want = formulas.gemm(a[None, None], b[None, None], c[None, None], alpha, beta)
    out = c.copy()
    descriptor = BatchedGemmStrided(
        A=a[None, None], B=b[None, None], C=out[None, None], M=M, N=N, K=K, alpha=alpha, beta=beta
    )
    plan(descriptor, backend="numpy").bind()()
    yield from _judge_gemm(
        want,
        K,
        dtype,
        positive,
        {
            "reference": out,
            "tile model": tile_model.gemm(a, b, dtype_c, alpha, c if beta else None, beta),
        },
    )


def precision_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """One random GEMM of float32 with alpha, multiplied in TF32, through both
    implementations."""
    precision, positive = str(rng.choice(("tf32", "tf32x3"))), bool(rng.integers(2))
    M, N, K = int(rng.integers(1, 33)), int(rng.integers(1, 33)), int(2 ** rng.uniform(0, 12))
    draw, size = rng.random if positive else rng.standard_normal, float(10 ** rng.uniform(-3, 3))
    a, b = ((size * draw(s)).astype(np.float32) for s in ((M, K), (K, N)))
    alpha, out = rng.choice([1.0, -0.3, 2.5]), np.empty((M, N), np.float32)
    plan(
        BatchedGemmStrided(A=a, B=b, C=out, M=M, N=N, K=K, alpha=alpha, precision=precision),
        backend="numpy",
    ).bind()()
    want = formulas.gemm(a[None, None], b[None, None], None, alpha)
    yield from _judge_gemm(
        want,
        K,
        DType.float32,
        positive,
        {
            f"reference, {precision}": out,
            f"tile model, {precision}": tile_model.gemm(
                a, b, DType.float32, alpha, None, 0, precision=precision
            ),
        },
        precision,
    )


def sum_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """One random sum of up to 16 products, a bias and a residual of sizes up to 100, through both
    implementations."""
    dtype, positive = rng.choice(np.array(DTYPES, object)), bool(rng.integers(2))
    dtype_c = dtype if rng.integers(2) else dtype.accumulator
    M, N, summed = (int(rng.integers(1, n)) for n in (33, 33, 17))
    K = int(2 ** rng.uniform(0, 9))
    draw, size = rng.random if positive else rng.standard_normal, float(10 ** rng.uniform(-2, 2))
    a, b = (draw(s).astype(dtype.numpy) for s in ((summed, M, K), (summed, K, N)))
    bias, residual = ((size * draw(s)).astype(dtype.numpy) for s in (N, (M, N)))
    alpha, out = rng.choice([1.0, -0.3, 2.5]), np.empty((M, N), dtype_c.numpy)
    want = formulas.gemm(
        a[:, None],
        b[:, None],
        None,
        alpha,
        bias=bias[None, None],
        residual=residual[None, None],
        batch_group=summed,
    )
    plan(
        BatchedGemmStrided(
            A=a,
            B=b,
            C=out,
            bias=bias,
            residual=residual,
            M=M,
            N=N,
            K=K,
            batch=summed,
            c_batch_group=summed,
            alpha=alpha,
        ),
        backend="numpy",
    ).bind()()
    left, right = a.swapaxes(0, 1).reshape(M, -1), b.reshape(-1, N)
    yield from _judge_gemm(
        want,
        K * summed,
        dtype,
        positive,
        {
            "reference, sums": out,
            "tile model, sums": tile_model.gemm(
                left, right, dtype_c, alpha, None, 0, added=(bias[None], residual)
            ),
        },
    )


def projection_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """One random projection to q, k and v with a bias of sizes up to 100, q and k rotated, through
    the reference."""
    dtype, positive = rng.choice(np.array(DTYPES, object)), bool(rng.integers(2))
    dtype_out = dtype if rng.integers(2) else dtype.accumulator
    S, K, D = int(rng.integers(1, 33)), int(2 ** rng.uniform(0, 12)), int(rng.choice((16, 64)))
    draw, style = (
        rng.random if positive else rng.standard_normal,
        str(rng.choice(("halves", "pairs"))),
    )
    x, weight = (draw(s).astype(dtype.numpy) for s in ((1, S, K), (4 * D, K)))
    bias = (10 ** rng.uniform(-2, 2) * draw(4 * D)).astype(np.float32)
    angle = rng.uniform(0, 100, (S, int(rng.integers(1, D // 2 + 1))))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    out = {
        n: np.empty((1, heads, S, D), dtype_out.numpy)
        for n, heads in (("q", 2), ("k", 1), ("v", 1))
    }
    plan(
        QkvProjection.from_arrays(
            x, weight, out["q"], out["k"], out["v"], bias=bias, cos=cos, sin=sin, rotary_style=style
        ),
        backend="numpy",
    ).bind()()
    want = qkv_projection(x, weight, bias, 2, 1, D, cos, sin, style, np.arange(S)[None])
    for name, y in out.items():
        yield from _judge_gemm(want[name][0], K, dtype, positive, {"reference, projections": y})


def _judge_gemm(
    expected: formulas.GemmResult,
    K: int,
    dtype: DType,
    positive: bool,
    results: Mapping[str, Array],
    precision: str | None = None,
) -> Iterator[Sample]:
    unit = (
        dtype.accumulator.unit_roundoff
        * (K + 4 if positive else np.sqrt(K + 4))
        * expected.magnitude
    )
    if precision == "tf32x3":
        unit *= tolerances.TF32X3
    for who, x in results.items():
        actual, dtype_c = x.reshape(expected.out.shape), DType.of(x.dtype)
        bound = tolerances.gemm(
            expected, K, dtype, dtype_c, zero_mean=not positive, precision=precision
        )
        needed = _needed(actual, expected.out, bound - tolerances.GEMM_CONSTANT * unit, unit)
        verdict = check.gemm_verdict(
            expected,
            K,
            dtype,
            actual,
            actual.shape[:-1],
            None,
            zero_mean=not positive,
            precision=precision,
        )
        to = "" if dtype_c is dtype else f" to {dtype_c}"
        yield Sample(
            f"gemm {'K+4' if positive else '√(K+4)'} {who} {dtype}{to}", needed, verdict.worst
        )


def _needed(actual: Array, expected: Floats, rest: Floats, unit: Floats) -> float:
    """max of (|actual − expected| − rest) / unit over the finite elements, at least 0."""
    finite = np.isfinite(expected)
    if not finite.any():
        return 0.0
    error = np.abs(actual.astype(np.float64)[finite] - expected[finite]) - rest[finite]
    return max(float((error / np.maximum(unit[finite], 1e-300)).max()), 0.0)
