"""The oracle's variants of attention and its merge against the formulas in plain Python, one
element at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from kernelseam.oracle import formulas
from kernelseam.oracle.formulas import Variant

NAN, INF = math.nan, math.inf
B, H, G, S_q, S_k, D, D_v = 2, 4, 2, 4, 6, 3, 2
SCALE = 0.7
RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal(s) for s in ((B, H, S_q, D), (B, G, S_k, D), (B, G, S_k, D_v)))
FULL = Variant(
    window=(2, 1),
    prefix_lengths=(1, 3),
    softcap=1.5,
    alibi_slopes=RNG.random((B, H)) - 0.3,
    bias=RNG.standard_normal((B, H, S_q, S_k)),
    mask=RNG.random((B, H, S_q, S_k)) < 0.7,
    sinks=RNG.standard_normal(H),
    q_lengths=(3, 4),
    kv_lengths=(6, 2),
)
"""Every option."""
ALONE = {
    "plain": Variant(),
    "window": Variant(window=FULL.window),
    "left": Variant(window=(1, None)),
    "right": Variant(window=(None, 1)),
    "diagonal": Variant(window=(0, 0)),
    "prefix": Variant(prefix_lengths=(0, 4)),
    "prefix-window": Variant(window=(0, 0), prefix_lengths=(5, -1)),
    "softcap": Variant(softcap=0.5),
    "alibi": Variant(alibi_slopes=FULL.alibi_slopes),
    "bias": Variant(bias=FULL.bias),
    "mask": Variant(mask=FULL.mask),
    "sinks": Variant(sinks=FULL.sinks),
    "q-lengths": Variant(q_lengths=(3, 0)),
    "kv-lengths": Variant(kv_lengths=(0, 5)),
    "lengths": Variant(q_lengths=(4, 1), kv_lengths=(2, 6)),
    "all": FULL,
}


def _row(b: int, h: int, i: int, causal: bool, v: Variant) -> dict[str, Any]:
    """One query's results: what it sees, its scores, and then the sums."""
    n_q = S_q if v.q_lengths is None else v.q_lengths[b]
    n_k = S_k if v.kv_lengths is None else v.kv_lengths[b]
    if i >= n_q:
        nothing = [0.0] * D_v
        return {
            "out": nothing,
            "lse": 0.0,
            "pv": nothing,
            "values": nothing,
            "products": 0.0,
            "changes": 0.0,
        }
    scores, values, products, changes = [], [], [], []
    for j in range(n_k):
        d = j - i - (n_k - n_q)
        left, right = v.window
        in_band = (
            (not causal or d <= 0)
            and (left is None or -left <= d)
            and (right is None or d <= right)
        )
        seen = in_band or (v.prefix_lengths is not None and j < v.prefix_lengths[b])
        if not seen or (v.mask is not None and not v.mask[b, h, i, j]):
            continue
        q, k = Q[b, h, i].tolist(), K[b, h // (H // G), j].tolist()
        x, change = SCALE * sum(y * z for y, z in zip(q, k, strict=True)), 0.0
        if v.softcap is not None:
            x = v.softcap * math.tanh(x / v.softcap)
            change += abs(x)
        if v.alibi_slopes is not None:
            x -= v.alibi_slopes[b, h] * abs(d)
            change += abs(v.alibi_slopes[b, h] * d)
        if v.bias is not None:
            x += v.bias[b, h, i, j]
            change += abs(v.bias[b, h, i, j])
        scores.append(x)
        values.append(V[b, h // (H // G), j].tolist())
        products.append(SCALE * sum(abs(y * z) for y, z in zip(q, k, strict=True)))
        changes.append(change)
    if v.sinks is not None:
        scores.append(v.sinks[h])
        values.append([0.0] * D_v)
        changes.append(abs(v.sinks[h]))
    total = sum(math.exp(x) for x in scores)
    ell = sum(math.exp(x - max(scores)) for x in scores)

    def weighed(of: Sequence[Sequence[float]]) -> list[float]:
        return [
            sum(math.exp(x) * row[c] for x, row in zip(scores, of, strict=True)) / (total or 1)
            for c in range(D_v)
        ]

    sizes = [[abs(x) for x in row] for row in values]
    return {
        "out": weighed(values),
        "lse": math.log(total) if scores else -INF,
        "pv": weighed(sizes),
        "values": [sum(row[c] for row in sizes) / (ell or 1) for c in range(D_v)],
        "products": max(products, default=0.0),
        "changes": max(changes, default=0.0),
    }


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ALONE)
def test_attention_is_the_formula(name: str, causal: bool) -> None:
    actual = formulas.attention(Q, K, V, causal, SCALE, None, ALONE[name])
    for b, h, i in np.ndindex(B, H, S_q):
        for what, expected in _row(b, h, i, causal, ALONE[name]).items():
            assert getattr(actual, what)[b, h, i] == pytest.approx(
                expected, rel=1e-12, abs=1e-14
            ), (
                what,
                b,
                h,
                i,
            )


def test_sampled_rows_are_those_of_the_whole() -> None:
    rows = [0, 3, 7, 13, 30, 31]
    whole, part = (formulas.attention(Q, K, V, False, SCALE, r, FULL) for r in (None, rows))
    for name in ("out", "lse", "pv", "products", "values", "changes"):
        expected = getattr(whole, name).reshape(B * H * S_q, *getattr(whole, name).shape[3:])[rows]
        np.testing.assert_allclose(getattr(part, name), expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("name", ["window", "mask", "kv-lengths", "all"])
def test_what_is_hidden_never_contributes(name: str) -> None:
    variant, k, v, only = ALONE[name], K.copy(), V.copy(), np.zeros_like(V)
    k[:, :, 4], v[:, :, 4], only[:, :, 4] = NAN, INF, 1
    clean, actual = (
        formulas.attention(Q, x, y, False, SCALE, None, variant) for x, y in ((K, V), (k, v))
    )
    sees = formulas.attention(Q, K, only, False, SCALE, None, variant).out[..., 0] > 0
    assert sees.any() and not sees.all()
    for what in ("out", "lse", "pv", "values"):
        # computed apart where something is not finite: sums in another order
        x, y = (getattr(results, what)[~sees] for results in (actual, clean))
        np.testing.assert_allclose(x, y, rtol=1e-13, atol=1e-15)
    assert np.isnan(actual.lse[sees]).all() and np.isnan(actual.out[sees]).all()


def test_biases_that_are_infinite() -> None:
    bias = np.zeros((B, H, S_q, S_k))
    bias[0, 0, 0, :] = bias[0, 0, 1, :5] = -INF
    bias[0, 0, 2, 3] = INF
    actual = formulas.attention(Q, K, V, False, SCALE, None, Variant(bias=bias))
    assert (
        actual.out[0, 0, 0].tolist() == [0, 0]
        and actual.lse[0, 0, 0] == -INF
        and actual.changes[0, 0, 0] == 0
    )
    np.testing.assert_allclose(actual.out[0, 0, 1], V[0, 0, 5], rtol=1e-14)
    assert actual.changes[0, 0, 1] == 0, "a key that weighs nothing does not widen the bound"
    assert math.isnan(actual.lse[0, 0, 2])
    assert np.isfinite(actual.lse[0, 0, 3])


def test_keys_that_weigh_nothing_do_not_widen_the_bound() -> None:
    bias = np.zeros((B, H, S_q, S_k))
    bias[..., 0], bias[..., 1] = -60000, -80
    actual = formulas.attention(Q, K, V, False, SCALE, None, Variant(bias=bias))
    assert (actual.changes == 80).all()


def test_a_row_that_sees_no_key_has_its_sink() -> None:
    variant = Variant(mask=np.zeros((B, H, S_q, S_k), bool), sinks=np.array([0.5, -INF, 3.0, -2.0]))
    actual = formulas.attention(Q, K, V, False, SCALE, None, variant)
    assert (actual.out == 0).all()
    assert actual.lse[0, :, 0].tolist() == [0.5, -INF, 3.0, -2.0]
    assert actual.changes[0, :, 0].tolist() == [0.5, 0, 3, 2]


def test_merged_states_are_the_formula() -> None:
    rng = np.random.default_rng(3)
    outs, lses = rng.standard_normal((3, 2, 2, 4, 5)), 3 * rng.standard_normal((3, 2, 2, 4))
    lses[1, 0, 0, 0] = lses[:, 1, 1, 3] = -INF
    outs[1, 0, 0, 0] = outs[:, 1, 1, 3] = NAN
    actual = formulas.merge_states(outs, lses)
    for b, h, r in np.ndindex(2, 2, 4):
        parts = [n for n in range(3) if lses[n, b, h, r] > -INF]
        if not parts:
            assert (
                actual.out[b, h, r].tolist() == [0.0] * 5
                and actual.lse[b, h, r] == -INF
                and actual.sizes[b, h, r] == 0
            )
            continue
        s = math.log(sum(math.exp(lses[n, b, h, r]) for n in parts))
        weights = [math.exp(lses[n, b, h, r] - s) for n in parts]
        expected = [
            sum(w * outs[n, b, h, r, c] for w, n in zip(weights, parts, strict=True))
            for c in range(5)
        ]
        sizes = [
            sum(w * abs(outs[n, b, h, r, c]) for w, n in zip(weights, parts, strict=True))
            for c in range(5)
        ]
        assert actual.lse[b, h, r] == pytest.approx(s, rel=1e-13)
        assert actual.out[b, h, r] == pytest.approx(expected, rel=1e-12, abs=1e-14)
        assert actual.magnitude[b, h, r] == pytest.approx(sizes, rel=1e-12)
        assert actual.sizes[b, h, r] == pytest.approx(max(abs(lses[n, b, h, r]) for n in parts))


def test_merged_parts_of_the_keys_are_the_whole() -> None:
    parts = [(0, 2), (2, 2), (2, 5), (5, 6)]
    some = [formulas.attention(Q, K[:, :, a:b], V[:, :, a:b], False, SCALE) for a, b in parts]
    actual = formulas.merge_states(np.stack([x.out for x in some]), np.stack([x.lse for x in some]))
    expected = formulas.attention(Q, K, V, False, SCALE)
    np.testing.assert_allclose(actual.out, expected.out, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(actual.lse, expected.lse, rtol=1e-13)


def test_no_parts_and_lost_ones() -> None:
    actual = formulas.merge_states(np.ones((0, 1, 1, 2, 3)), np.ones((0, 1, 1, 2)))
    assert (actual.out == 0).all() and (actual.lse == -INF).all()
    lses = np.zeros((2, 1, 1, 2))
    lses[1, 0, 0] = NAN, INF
    actual = formulas.merge_states(np.ones((2, 1, 1, 2, 3)), lses)
    assert np.isnan(actual.out).all() and np.isnan(actual.lse).all()
