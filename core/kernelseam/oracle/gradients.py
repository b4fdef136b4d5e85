"""The oracle of an attention's gradients: the formulas in float64 or wider, from q, k, v and dout.

It computes its own result and LSE. Each gradient comes with the terms of its bound in
``tolerances``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields

import numpy as np

from kernelseam.frozen import dataclass
from kernelseam.oracle.formulas import PLAIN, Array, Floats, Variant

Shape = tuple[int, ...]
SPREAD = 3.0
"""Over the root of the sum of squares of many rounding errors' bounds: five standard deviations."""


@dataclass(frozen=True)
class Gradient:
    """One gradient, and the sums of magnitudes that a relative error of one unit would move it by,
    all of one shape."""

    value: Floats
    rounded: Floats
    """of the factors that are rounded to the inputs' dtype before they are summed over: p and
    ds."""
    single: Floats
    """of scores, products and sums."""
    outs: Floats
    """of the forward's result, in delta = Σ dout·out."""
    lses: Floats
    """of its LSE."""
    vanished: Floats
    """Its change where every p, ds and element of the result is off by 1."""


PARTS = tuple(f.name for f in fields(Gradient))
Parts = dict[str, Floats]


def attention_bwd(
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    causal: bool,
    scale: float,
    variant: Variant = PLAIN,
    bias_shape: Shape | None = None,
) -> dict[str, Gradient]:
    """dq, dk and dv of ``formulas.attention`` given dout [B,H,S_q,D_v], shaped as q, k and v; dbias
    of ``bias_shape``, 1 where it is summed over an axis, and dsinks [H] where the variant has them.

    dp = dout·vᵀ, delta = Σ dout·out, dx = p·(dp − delta), ds = dx·(1 − tanh²) under a softcap, dq =
    scale·ds·k, dk = scale·dsᵀ·q, dv = pᵀ·dout, dbias = dx, dsinks = −Σ e^(sink − lse)·delta. Rows
    after q_lengths or kv_lengths get 0.
    """
    B, H, S_q, _ = q.shape
    G, S_k = k.shape[1:3]
    group = max(H // max(G, 1), 1)
    gradients = {"dq": _blank(q.shape), "dk": _blank(k.shape), "dv": _blank(v.shape)}
    plane = _blank((B, H, S_q, S_k) if bias_shape is not None else (0,))
    sinks = _blank((B, H, S_q, 1))
    for b, h in np.ndindex(B, H):
        n_q = S_q if variant.q_lengths is None else variant.q_lengths[b]
        n_k = S_k if variant.kv_lengths is None else variant.kv_lengths[b]
        Q, dO = (wide(x[b, h, :n_q]) for x in (q, dout))
        K, V = (wide(x[b, h // group, :n_k]) for x in (k, v))
        i, j = np.arange(n_q), np.arange(n_k)
        with np.errstate(all="ignore"):
            p, dx, ds, sink = pairs(Q, K, V, dO, Head(b, h, n_q, n_k, i, j), causal, scale, variant)
            _add(gradients["dq"], (b, h, slice(n_q)), times(ds, K, scale, n_k))
            across = {name: x.T for name, x in ds.items()}
            _add(gradients["dk"], (b, h // group, slice(n_k)), times(across, Q, scale, n_q * group))
            across = {name: x.T for name, x in p.items()}
            _add(gradients["dv"], (b, h // group, slice(n_k)), times(across, dO, 1.0, n_q * group))
        if bias_shape is not None:
            _add(plane, (b, h, slice(n_q), slice(n_k)), dx)
        _add(sinks, (b, h, slice(n_q), 0), sink)
    if bias_shape is not None:
        gradients["dbias"] = _summed(plane, bias_shape)
    if variant.sinks is not None:
        gradients["dsinks"] = {
            name: x[0, :, 0, 0] for name, x in _summed(sinks, (1, H, 1, 1)).items()
        }
    return {name: Gradient(**parts) for name, parts in gradients.items()}


@dataclass(frozen=True, eq=False)
class Head:
    """The queries and keys of one head that are computed: all, or some."""

    batch: int
    head: int
    n_q: int
    """Number of queries of the head."""
    n_k: int
    i: Array
    """Indices of the queries that are computed."""
    j: Array


def pairs(
    Q: Floats,
    K: Floats,
    V: Floats,
    dO: Floats,
    at: Head,
    causal: bool,
    scale: float,
    variant: Variant,
    forward: tuple[Floats, Floats] | None = None,
) -> tuple[Parts, Parts, Parts, Parts]:
    """p, dx and ds of one head's queries and keys, and the sink's part of every row. ``forward``:
    the forward's result and LSE of these queries; None: they are computed, and K and V hold all
    keys."""
    b, h, i, j = at.batch, at.head, at.i, at.j
    d = j - i[:, None] - (at.n_k - at.n_q)
    attended, slopes, bias, sink_logit = variant.of_pairs(causal, b, h, i, j, d)
    attended = variant.masked(attended, b, h, i, j, at.n_q, at.n_k)
    change = variant.changer(b, h, i, j, at.n_q, at.n_k)
    product, products = (
        scale * (Q @ K.T),
        math.sqrt(Q.shape[1]) * abs(scale) * (np.abs(Q) @ np.abs(K).T),
    )
    cap = variant.softcap
    capped = product if cap is None else cap * np.tanh(product / cap)
    flat = np.ones(d.shape) if cap is None else 1 - np.tanh(product / cap) ** 2
    own = capped - slopes + bias
    new = None if change is None else change(own)
    x = np.where(attended, own if new is None else new.scores, -np.inf)
    if forward is None:
        top = np.maximum(x.max(axis=1, initial=-np.inf), sink_logit)
        nothing = np.isneginf(top)
        weights, sink = np.exp(x - top[:, None]), np.exp(sink_logit - top)
        total = weights.sum(axis=1) + sink
        p = np.where(nothing[:, None] | np.isneginf(x), 0, weights / total[:, None])
        lse, weight = np.where(nothing, 0, top + np.log(total)), np.where(nothing, 0, sink / total)
        out = p @ V
    else:
        out, lse = forward
        nothing = np.isneginf(lse)
        lse = np.where(nothing, 0, lse)
        p = np.where(nothing[:, None] | np.isneginf(x), 0, np.exp(x - lse[:, None]))
        weight = np.where(nothing, 0, np.exp(sink_logit - lse))

    products_out = dO * out
    delta, sizes = products_out.sum(axis=1), np.abs(products_out).sum(axis=1)
    # Rounding errors of a row's elements are independent: their sum grows with the root.
    outs = np.minimum(sizes, SPREAD * np.sqrt((products_out**2).sum(axis=1)))
    dp = dO @ V.T
    difference = dp - delta[:, None]
    dx = np.where(p == 0, 0, p * difference)
    # Error bounds of a score, of dp − delta, and of 1 − tanh².
    changes = (0 if cap is None else np.abs(capped)) + slopes + np.abs(bias)
    score = 1 + products + np.abs(changes)
    growth, bend = np.ones(d.shape), np.zeros(d.shape)
    if new is not None:
        growth, bend = new.slope, np.abs(new.bend) * score + np.abs(new.slope)
        score = 1 + score * np.abs(growth) + np.abs(new.scores)
    score = np.where(p == 0, 0, score)
    difference_bound = math.sqrt(V.shape[1]) * (np.abs(dO) @ np.abs(V).T + sizes[:, None])
    derivative_bound = np.zeros(d.shape) if cap is None else 1 + products / cap * flat
    nonzero, dout_sizes = (p > 0).astype(float), np.abs(dO).sum(axis=1)[:, None]
    single = score * np.abs(dx) + p * difference_bound
    of_p = {
        "value": p,
        "rounded": p,
        "single": score * p,
        "outs": np.zeros(p.shape),
        "lses": p * np.abs(lse)[:, None],
        "vanished": nonzero,
    }
    of_dx = {
        "value": dx,
        "rounded": np.abs(dx),
        "single": single,
        "outs": p * outs[:, None],
        "lses": np.abs(dx) * np.abs(lse)[:, None],
        "vanished": nonzero * (1 + np.abs(difference)) + p * dout_sizes,
    }
    steep = flat * np.abs(growth)
    of_ds = {name: part * steep for name, part in of_dx.items()}
    of_ds["value"] = dx * flat * growth
    bound = derivative_bound * np.abs(growth) + flat * bend
    of_ds["single"] = of_ds["single"] + np.abs(dx) * bound
    of_ds["vanished"] = of_dx["vanished"]
    of_sink = {
        "value": -weight * delta,
        "rounded": weight * np.abs(delta),
        "single": weight
        * (
            np.abs(delta) * (1 + abs(sink_logit) if sink_logit > -np.inf else 1)
            + math.sqrt(V.shape[1]) * sizes
        ),
        "outs": weight * outs,
        "lses": weight * np.abs(delta * lse),
        "vanished": np.abs(delta) + weight * dout_sizes[:, 0],
    }
    return _narrowed(of_p), _narrowed(of_dx), _narrowed(of_ds), _narrowed(of_sink)


def wide(x: Array) -> Array:
    """In float64; float64 in a wider type, where the host has one, so that the oracle's own errors
    do not count."""
    return x.astype(np.longdouble if x.dtype == np.float64 else np.float64)


def _narrowed(parts: Parts) -> Parts:
    """The terms of the bounds in float64, whose products are fast."""
    return {
        name: x if name == "value" else x.astype(np.float64, copy=False)
        for name, x in parts.items()
    }


def times(x: Mapping[str, Floats], y: Floats, scale: float, count: int) -> Parts:
    """scale·x·y, a sum of ``count`` terms once all are added."""
    size = np.abs(y).astype(np.float64, copy=False)
    parts = {name: abs(scale) * (x[name] @ size) for name in PARTS if name != "value"}
    parts["value"] = scale * (x["value"] @ y)
    # scale·ds may be rounded instead of ds
    parts["vanished"] = max(abs(scale), 1) * (x["vanished"] @ size)
    parts["single"] = parts["single"] + math.sqrt(count) * parts["rounded"]
    return parts


def _blank(shape: Shape) -> Parts:
    return {name: np.zeros(shape) for name in PARTS}


def _add(to: Parts, index: tuple[int | slice, ...], more: Mapping[str, Floats]) -> None:
    for name, x in more.items():
        to[name][index] += x


def _summed(x: Parts, shape: Shape) -> Parts:
    """Summed over the axes along which ``shape`` is 1: float32 terms, rounded once after the
    sum."""
    whole = x["value"].shape
    axes = tuple(i for i, (n, m) in enumerate(zip(whole, shape, strict=True)) if m == 1 != n)
    parts = {name: part.sum(axis=axes, keepdims=True) for name, part in x.items()}
    parts["single"] = (
        parts["single"] + math.sqrt(math.prod(whole[i] for i in axes)) * parts["rounded"]
    )
    parts["rounded"] = np.zeros(shape)
    # A row's error is the same for all its keys, and each row has its own.
    of_rows = x["outs"].sum(axis=3, keepdims=True) if 3 in axes else x["outs"]
    rows = tuple(i for i in axes if i < 3)
    if rows:  # the error of a row of one element may be its whole bound
        root = np.sqrt((of_rows**2).sum(axis=rows, keepdims=True))
        of_rows = np.minimum(of_rows.sum(axis=rows, keepdims=True), SPREAD * root)
    parts["outs"] = of_rows
    return parts
