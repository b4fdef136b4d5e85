"""Random problems through the NumPy reference: which constant of ``tolerances`` each would need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from kernelseam.descriptors import Attention, AttentionBwd, BatchedGemmStrided
from kernelseam.dtypes import DType
from kernelseam.oracle import check, formulas, tolerances
from kernelseam.oracle.formulas import PLAIN, Array, Floats, Variant
from kernelseam.oracle.gradients import attention_bwd
from kernelseam.planning import plan
from kernelseam.samples.data import attention as attention_data

DTYPES = (DType.float16, DType.bfloat16, DType.float32, DType.float64)
SIZES = (1.0, 2.0**-12)
"""Scales of a GEMM's operands: with the smaller one, results are subnormal in float16."""


@dataclass(frozen=True)
class Sample:
    """One problem."""

    needed: float
    """The smallest sufficient constant."""
    ratio: float
    """Error over tolerance with the constant in use."""


def attention_sample(rng: np.random.Generator) -> Sample:
    """One head, D 16 to 256, 1 to 4096 keys, of normal, positive, ramp, extreme or climbing
    scores."""
    dtype, D = rng.choice(np.array(DTYPES, object)), int(rng.choice((16, 40, 64, 128, 256)))
    kind = str(rng.choice(("normal", "ramp", "positive", "extreme", "climbing")))
    S_q, S_k = int(rng.integers(1, 33)), int(2 ** rng.uniform(0, 12))
    q, k, v = (rng.standard_normal((n, D)) for n in (S_q, S_k, S_k))
    if kind == "positive":
        q, k, v = np.abs(q), np.abs(k), np.abs(v)
    else:
        _shape(q, k, kind)
    q, k, v = (x.astype(dtype.numpy)[None, None] for x in (q, k, v))
    return _attention(q, k, v, causal=bool(rng.integers(2)))


def variant_sample(rng: np.random.Generator) -> Sample:
    """One head with changed scores."""
    q, k, v, options = _scored(rng)
    return _attention(q[None, None], k[None, None], v[None, None], **options)


def _shape(q: Array, k: Array, kind: str) -> None:
    if kind == "ramp":
        attention_data.ramp(q, k)
    else:
        attention_data.shape_scores(q, k, kind)


def _scored(rng: np.random.Generator) -> tuple[Array, Array, Array, dict[str, Any]]:
    """One head, q [S_q,D], k and v [S_k,D], and its options: softcaps from 1/4 to 1000, slopes from
    1/1000 to 1, biases of sizes from 1/10 to 1000, sinks from −10 to 100, each in half of the
    heads; scores of sizes from 1 to 60."""
    dtype, D = rng.choice(np.array(DTYPES[:3], object)), int(rng.choice((16, 64, 128)))
    S_q, S_k = int(rng.integers(1, 33)), int(2 ** rng.uniform(0, 12))
    size = 60 ** rng.uniform(0, 0.5)
    q, k, v = (
        (f * rng.standard_normal((n, D))).astype(dtype.numpy)
        for n, f in ((S_q, size), (S_k, size), (S_k, 1))
    )
    capped, sloped, biased, sunk = rng.random(4) < 0.5
    bias = 10 ** rng.uniform(-1, 3) * rng.standard_normal((1, 1, S_q, S_k)) * biased
    sink = rng.uniform(-10, 100) if sunk else -np.inf
    return (
        *(q, k, v),
        {
            "softcap": float(2 ** rng.uniform(-2, 10)) if capped else None,
            "alibi_slopes": np.full((1, 1), 10 ** rng.uniform(-3, 0) * sloped, np.float32),
            "bias": bias.astype(np.float32),
            "sinks": np.full(1, sink, np.float32),
        },
    )


def _variant(options: dict[str, Any]) -> Variant:
    if not options:
        return PLAIN
    return Variant(
        softcap=options["softcap"],
        alibi_slopes=options["alibi_slopes"],
        bias=options["bias"],
        sinks=options["sinks"],
    )


def _attention(q: Array, k: Array, v: Array, causal: bool = False, **options: Any) -> Sample:
    (S_q, D), S_k, dtype = q.shape[2:], k.shape[2], DType.of(q.dtype)
    want = formulas.attention(q, k, v, causal, D**-0.5, None, _variant(options))
    out, lse = np.empty_like(q), np.empty((1, 1, S_q), dtype.accumulator.numpy)
    plan(Attention.from_arrays(q, k, v, out, lse, causal=causal, **options)).bind()()
    growth = dtype.accumulator.unit_roundoff * (
        np.sqrt(S_k) + np.sqrt(D) * want.products + want.changes
    )
    bound, lse_bound = tolerances.attention(want, S_k, D, dtype, dtype)
    constant = tolerances.ATTENTION_CONSTANT
    unit = growth[..., None] * want.pv
    needed = max(
        _needed(out, want.out, bound - constant * unit, unit),
        _needed(lse, want.lse, np.zeros_like(want.lse), lse_bound / constant),
    )
    verdict = check.attention_verdict(want, S_k, D, dtype, out, lse, out.shape[:-1], None)
    return Sample(needed, verdict.worst)


def gradient_sample(rng: np.random.Generator) -> Sample:
    """Two query heads over one of keys, up to 1024: of normal, ramp, extreme and climbing scores,
    or of changed ones."""
    kind = str(rng.choice(("normal", "ramp", "extreme", "climbing", "changed")))
    options: dict[str, Any] = {}
    if kind == "changed":
        q, k, v, options = _scored(rng)
        q, causal, dtype = np.stack([q, q[::-1]]), False, DType.of(q.dtype)
        options["alibi_slopes"], options["sinks"] = (
            options[n].repeat(2, -1) for n in ("alibi_slopes", "sinks")
        )
        options["bias"] = options["bias"].repeat(2, 1)
    else:
        dtype, causal = rng.choice(np.array(DTYPES, object)), bool(rng.integers(2))
        D, S_q, S_k = (
            int(rng.choice((16, 64, 128))),
            int(rng.integers(1, 65)),
            int(2 ** rng.uniform(0, 10)),
        )
        q, k, v = (rng.standard_normal(s) for s in ((2, S_q, D), (S_k, D), (S_k, D)))
        _shape(q, k, kind)
    dout = rng.standard_normal(q.shape)
    q, k, v, dout = (x.reshape(1, -1, *x.shape[-2:]).astype(dtype.numpy) for x in (q, k, v, dout))
    scale, variant = q.shape[-1] ** -0.5, _variant(options)
    forward = formulas.attention(q, k, v, causal, scale, None, variant)
    out, lse = forward.out.astype(dtype.numpy), forward.lse.astype(dtype.accumulator.numpy)
    shape = options["bias"].shape if options else None
    want = attention_bwd(q, k, v, dout, causal, scale, variant, shape)
    x = {"q": q, "k": k, "v": v, "bias": options.get("bias"), "sinks": options.get("sinks")}
    found: dict[str, Any] = {n: np.empty_like(x[n[1:]]) for n in want}
    plan(
        AttentionBwd(
            forward=Attention.from_arrays(q, k, v, out, lse, causal=causal, **options),
            dout=dout,
            **found,
        )
    ).bind()()
    constant, needed = tolerances.ATTENTION_CONSTANT, 0.0
    for name, g in want.items():
        unit = dtype.accumulator.unit_roundoff * (g.single + g.lses)
        bound = tolerances.gradient(g, dtype, DType.of(found[name].dtype))
        needed = max(needed, _needed(found[name], g.value, bound - constant * unit, unit))
    return Sample(needed, check.attention_bwd(want, dtype, found).worst)


def gemm_sample(rng: np.random.Generator) -> Sample:
    """One product, K 1 to 4096, zero-mean or positive, in the dtype or to the accumulator's."""
    dtype, positive = rng.choice(np.array(DTYPES, object)), bool(rng.integers(2))
    dtype_c = dtype if rng.integers(2) else dtype.accumulator
    M, N, K = int(rng.integers(1, 33)), int(rng.integers(1, 33)), int(2 ** rng.uniform(0, 12))
    draw, size = rng.random if positive else rng.standard_normal, float(rng.choice(SIZES))
    a, b = ((size * draw(s)).astype(dtype.numpy) for s in ((M, K), (K, N)))
    c = (size * draw((M, N))).astype(dtype_c.numpy)
    alpha, beta = rng.choice([1.0, -0.3, 2.5]), rng.choice([0.0, 1.0, -0.7])
    want = formulas.gemm(a[None, None], b[None, None], c[None, None], alpha, beta)
    return _gemm(want, K, positive, A=a, B=b, C=c, M=M, N=N, K=K, alpha=alpha, beta=beta)


def precision_sample(rng: np.random.Generator) -> Sample:
    """One product of float32 with alpha, multiplied in TF32."""
    precision, positive = str(rng.choice(("tf32", "tf32x3"))), bool(rng.integers(2))
    M, N, K = int(rng.integers(1, 33)), int(rng.integers(1, 33)), int(2 ** rng.uniform(0, 12))
    draw, size = rng.random if positive else rng.standard_normal, float(10 ** rng.uniform(-3, 3))
    a, b = ((size * draw(s)).astype(np.float32) for s in ((M, K), (K, N)))
    alpha, c = rng.choice([1.0, -0.3, 2.5]), np.empty((M, N), np.float32)
    want = formulas.gemm(a[None, None], b[None, None], None, alpha)
    operands = {"A": a, "B": b, "C": c, "M": M, "N": N, "K": K}
    return _gemm(want, K, positive, **operands, alpha=alpha, precision=precision)


def sum_sample(rng: np.random.Generator) -> Sample:
    """One sum of up to 16 products, a bias and a residual of sizes up to 100."""
    dtype, positive = rng.choice(np.array(DTYPES, object)), bool(rng.integers(2))
    dtype_c = dtype if rng.integers(2) else dtype.accumulator
    M, N, summed = (int(rng.integers(1, n)) for n in (33, 33, 17))
    K = int(2 ** rng.uniform(0, 9))
    draw, size = rng.random if positive else rng.standard_normal, float(10 ** rng.uniform(-2, 2))
    a, b = (draw(s).astype(dtype.numpy) for s in ((summed, M, K), (summed, K, N)))
    bias, residual = ((size * draw(s)).astype(dtype.numpy) for s in (N, (M, N)))
    alpha, c = rng.choice([1.0, -0.3, 2.5]), np.empty((M, N), dtype_c.numpy)
    want = formulas.gemm(
        a[:, None],
        b[:, None],
        None,
        alpha,
        bias=bias[None, None],
        residual=residual[None, None],
        batch_group=summed,
    )
    operands = {"A": a, "B": b, "C": c, "bias": bias, "residual": residual, "M": M, "N": N, "K": K}
    groups = {"batch": summed, "c_batch_group": summed}
    return _gemm(want, K * summed, positive, **operands, **groups, alpha=alpha)


def _gemm(want: formulas.GemmResult, summands: int, positive: bool, **given: Any) -> Sample:
    plan(BatchedGemmStrided(**given)).bind()()
    c, dtype, precision = given["C"], DType.of(given["A"].dtype), given.get("precision")
    unit = dtype.accumulator.unit_roundoff * want.magnitude
    unit *= summands + 4 if positive else np.sqrt(summands + 4)
    if precision == "tf32x3":
        unit *= tolerances.TF32X3
    how: dict[str, Any] = {"zero_mean": not positive, "precision": precision}
    bound = tolerances.gemm(want, summands, dtype, DType.of(c.dtype), **how)
    found = c.reshape(want.out.shape)
    verdict = check.gemm_verdict(want, summands, dtype, found, found.shape[:-1], None, **how)
    needed = _needed(found, want.out, bound - tolerances.GEMM_CONSTANT * unit, unit)
    return Sample(needed, verdict.worst)


def _needed(actual: Array, expected: Floats, rest: Floats, unit: Floats) -> float:
    """max of (|actual − expected| − rest) / unit over the finite elements, at least 0."""
    finite = np.isfinite(expected)
    if not finite.any():
        return 0.0
    error = np.abs(actual.astype(np.float64)[finite] - expected[finite]) - rest[finite]
    return max(float((error / np.maximum(unit[finite], 1e-300)).max()), 0.0)
