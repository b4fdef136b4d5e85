"""Random attentions with modified scores, with scores that outgrow a kept reference, and with
gradients, for ``samples``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from kernelseam.descriptors import Attention
from kernelseam.dtypes import DType
from kernelseam.oracle import formulas
from kernelseam.oracle.formulas import Array, Variant
from kernelseam.samples.data import attention as attention_data

from calibration.tile_model import Changes

DTYPES = (DType.float16, DType.bfloat16, DType.float32)


@dataclass(frozen=True, eq=False)
class Scored:
    """One head, q [S_q,D], k and v [S_k,D], and what is done to its scores, as each asks for it."""

    q: Array
    k: Array
    v: Array
    options: dict[str, Any]
    """For the descriptor."""
    variant: Variant
    """For the oracle."""
    changes: Changes
    """For the tile model."""


def scored(rng: np.random.Generator) -> Scored:
    """Softcaps from 1/4 to 1000, slopes from 1/1000 to 1, biases of sizes from 1/10 to 1000, sinks
    from −10 to 100, each in half of the heads; scores of sizes from 1 to 60."""
    dtype, D = rng.choice(np.array(DTYPES, object)), int(rng.choice((16, 64, 128)))
    S_q, S_k = int(rng.integers(1, 33)), int(2 ** rng.uniform(0, 12))
    size = 60 ** rng.uniform(0, 0.5)
    q, k, v = (
        (f * rng.standard_normal((n, D))).astype(dtype.numpy)
        for n, f in ((S_q, size), (S_k, size), (S_k, 1))
    )
    drawn = rng.random(4) < 0.5
    cap = float(2 ** rng.uniform(-2, 10)) if drawn[0] else None
    slope = np.float32(10 ** rng.uniform(-3, 0) if drawn[1] else 0)
    bias = (10 ** rng.uniform(-1, 3) * rng.standard_normal((S_q, S_k)) * drawn[2]).astype(
        np.float32
    )
    sink = np.float32(rng.uniform(-10, 100) if drawn[3] else -np.inf)
    d = np.abs(np.arange(S_k) - np.arange(S_q)[:, None] - (S_k - S_q)).astype(np.float32)
    alibi, plane, sinks = np.full((1, 1), slope), bias[None, None], np.full(1, sink)
    return Scored(
        q,
        k,
        v,
        {"softcap": cap, "alibi_slopes": alibi, "bias": plane, "sinks": sinks},
        Variant(softcap=cap, alibi=alibi, bias=plane, sinks=sinks),
        Changes(cap, slope * d, bias, float(sink)),
    )


@dataclass(frozen=True, eq=False)
class Outgrowing:
    """One head, q [S_q,D], k and v [S_k,D], of 16 bits."""

    q: Array
    k: Array
    v: Array
    causal: bool
    window: tuple[int | None, int | None]
    softcap: float | None
    sink: float


def outgrowing(rng: np.random.Generator) -> Outgrowing:
    """Scores over the keys, which the guarded softmax takes from the last to the first: normal,
    extreme, rising or falling by up to 16 a key, in up to six jumps of up to 10⁴ for all queries or
    some, with one high key, or faint (most lie where float16 hardly holds their weights). A sixth
    each has a causal mask, a window, a softcap, a sink; values of sizes from 10⁻⁶ to 10⁴."""
    dtype, D = rng.choice(np.array(DTYPES[:2], object)), int(rng.choice((64, 96, 128, 256)))
    S_q, S_k = int(rng.integers(1, 161)), int(2 ** rng.uniform(0, 11))
    q, k, v = (rng.standard_normal((n, D)) for n in (S_q, S_k, S_k))
    kind = str(rng.choice(("normal", "extreme", "slope", "jumps", "high key", "faint")))
    profile, every = np.zeros(S_k), 1
    if kind == "slope":
        profile = np.arange(S_k) * rng.choice((-1, 1)) * 10 ** rng.uniform(-2, 1.2)
    elif kind == "jumps":
        every, most = int(rng.integers(1, 25)), rng.choice((20, 80, 300, 10_000))
        for first in rng.integers(0, S_k, int(rng.integers(1, 7))):
            profile[:first] = rng.uniform(-most, most)
    elif kind == "high key":
        profile[rng.integers(S_k)] = 10 ** rng.uniform(0, 3)
    elif kind == "faint":
        q *= 0.05
        first = int(rng.integers(S_k))
        profile[:first] = rng.uniform(10, 40)
        profile[: int(rng.integers(first + 1))] -= rng.uniform(8, 18)
        v = np.where(profile[:, None] == profile.max(), 0, np.abs(v))
    if kind == "extreme":
        attention_data.shape_scores(q, k, kind)
    else:
        q[:, 1], k[:, 1] = 0, profile
        q[::every, 1] = np.sqrt(D)
    option = int(rng.integers(6))
    reach = (int(rng.integers(1, S_k + 1)), None if rng.integers(2) else int(rng.integers(S_k)))
    q, k, v = (x.astype(dtype.numpy) for x in (q, k, 10 ** rng.uniform(-6, 4) * v))
    return Outgrowing(
        q,
        k,
        v,
        option == 0,
        reach if option == 1 else (None, None),
        float(2 ** rng.uniform(0, 10)) if option == 2 else None,
        float(rng.uniform(-10, 100)) if option == 3 else -np.inf,
    )


@dataclass(frozen=True, eq=False)
class Differentiated:
    """Two heads over one of keys: q, k, v, dout and what the forward gave, its options as each asks
    for them."""

    arrays: dict[str, Array]
    forward: Attention
    causal: bool
    scale: float
    variant: Variant


def differentiated(rng: np.random.Generator) -> Differentiated:
    """Normal, ramp, extreme and climbing scores over up to 1024 keys, or those of ``scored``."""
    x, kind = scored(rng), str(rng.choice(("normal", "ramp", "extreme", "climbing", "changed")))
    dtype = rng.choice(np.array((*DTYPES, DType.float64), object))
    D = int(rng.choice((16, 64, 128)))
    S_q, S_k, causal = int(rng.integers(1, 65)), int(2 ** rng.uniform(0, 10)), bool(rng.integers(2))
    q, k, v, dout = (rng.standard_normal(s) for s in ((2, S_q, D), (S_k, D), (S_k, D), (2, S_q, D)))
    options: dict[str, Any] = {}
    variant = formulas.PLAIN
    if kind == "changed":
        dtype, (S_q, D), S_k, causal = DType.of(x.q.dtype), x.q.shape, len(x.k), False
        q, k, v = np.stack([x.q, x.q[::-1]]), x.k, x.v
        dout = rng.standard_normal(q.shape)
        options = {
            n: y if n == "softcap" else y.repeat(2, min(1, y.ndim - 1))
            for n, y in x.options.items()
        }
        variant = Variant(
            softcap=options["softcap"],
            alibi=options["alibi_slopes"],
            bias=options["bias"],
            sinks=options["sinks"],
        )
    elif kind == "ramp":
        attention_data.ramp(q, k)
    else:
        attention_data.shape_scores(q, k, kind)
    inputs: dict[str, Array] = {
        n: y.reshape(1, -1, *y.shape[-2:]).astype(dtype.numpy)
        for n, y in (("q", q), ("k", k), ("v", v), ("dout", dout))
    }
    want = formulas.attention(inputs["q"], inputs["k"], inputs["v"], causal, D**-0.5, None, variant)
    inputs["out"], inputs["lse"] = (
        want.out.astype(dtype.numpy),
        want.lse.astype(dtype.accumulator.numpy),
    )
    if variant.bias is not None:
        inputs["bias"] = variant.bias
    forward = Attention.from_arrays(
        *(inputs[n] for n in ("q", "k", "v", "out", "lse")), causal=causal, **options
    )
    return Differentiated(inputs, forward, causal, D**-0.5, variant)
