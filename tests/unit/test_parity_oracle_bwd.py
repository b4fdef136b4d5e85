"""The oracle's gradients against central differences of its forward, and their bounds against
planted errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import kernelseam
import numpy as np
import pytest
from kernelseam.dtypes import DType
from kernelseam.oracle import formulas, tolerances
from kernelseam.oracle.formulas import Variant
from kernelseam.oracle.gradients import PARTS, attention_bwd

B, H, G, S_q, S_k, D, D_v = 2, 4, 2, 4, 6, 3, 2
SCALE, STEP = 0.7, 1e-5
RNG = np.random.default_rng(0)
Q, K, V, DOUT = (
    RNG.standard_normal(s)
    for s in ((B, H, S_q, D), (B, G, S_k, D), (B, G, S_k, D_v), (B, H, S_q, D_v))
)
BIAS = RNG.standard_normal((B, H, S_q, S_k))
FULL = Variant(
    window=(2, 1),
    prefix_lengths=(1, 3),
    softcap=1.5,
    alibi_slopes=RNG.random((B, H)) - 0.3,
    bias=BIAS,
    mask=RNG.random((B, H, S_q, S_k)) < 0.7,
    sinks=RNG.standard_normal(H),
    q_lengths=(3, 4),
    kv_lengths=(6, 2),
)
VARIANTS = {
    "plain": Variant(),
    "window": Variant(window=(1, 1)),
    "prefix-window": Variant(window=(0, 0), prefix_lengths=(5, -1)),
    "softcap": Variant(softcap=0.5),
    "alibi": Variant(alibi_slopes=FULL.alibi_slopes),
    "bias": Variant(bias=BIAS),
    "mask": Variant(mask=FULL.mask),
    "sinks": Variant(sinks=FULL.sinks),
    "lengths": Variant(q_lengths=(4, 1), kv_lengths=(2, 6)),
    "all": FULL,
}


def _require(gradient: np.ndarray, loss: Callable[[np.ndarray], float], x: np.ndarray) -> None:
    """Along random directions, each of which moves every element."""
    for _ in range(4):
        step = STEP * RNG.standard_normal(x.shape)
        moved = (loss(x + step) - loss(x - step)) / 2
        assert moved == pytest.approx((gradient * step).sum(), rel=1e-6, abs=1e-12)
    assert np.abs(gradient).max() > 0.01


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_are_central_differences(name: str, causal: bool) -> None:
    variant = VARIANTS[name]

    def loss(q: np.ndarray = Q, k: np.ndarray = K, v: np.ndarray = V, **changed: Any) -> float:
        out = formulas.attention(q, k, v, causal, SCALE, None, replace(variant, **changed)).out
        return float((out * DOUT).sum())

    shape = (B, H, S_q, S_k) if variant.bias is not None else None
    actual = attention_bwd(Q, K, V, DOUT, causal, SCALE, variant, shape)
    _require(actual["dq"].value, lambda x: loss(q=x), Q)
    _require(actual["dk"].value, lambda x: loss(k=x), K)
    _require(actual["dv"].value, lambda x: loss(v=x), V)
    if variant.bias is not None:
        _require(actual["dbias"].value, lambda x: loss(bias=x), BIAS)
    if variant.sinks is not None:
        _require(actual["dsinks"].value, lambda x: loss(sinks=x), np.array(variant.sinks))
    more = {"dbias": variant.bias is not None, "dsinks": variant.sinks is not None}
    assert set(actual) == {"dq", "dk", "dv", *(n for n, there in more.items() if there)}


@pytest.mark.parametrize(
    "shape", [(B, H, S_q, S_k), (1, H, S_q, S_k), (B, 1, 1, S_k), (1, 1, 1, 1)]
)
def test_the_bias_s_gradient_is_summed_where_the_bias_repeats(shape: tuple[int, ...]) -> None:
    actual = attention_bwd(Q, K, V, DOUT, True, SCALE, FULL, shape)["dbias"]
    whole = attention_bwd(Q, K, V, DOUT, True, SCALE, FULL, (B, H, S_q, S_k))["dbias"]
    axes = tuple(i for i, n in enumerate(shape) if n == 1)
    np.testing.assert_allclose(
        actual.value, whole.value.sum(axis=axes, keepdims=True), rtol=1e-12, atol=1e-13
    )
    assert actual.value.shape == shape and (actual.rounded == 0).all()
    assert (actual.single >= whole.single.sum(axis=axes, keepdims=True) - 1e-12).all()


@pytest.mark.parametrize("unit", [1e-7, -1e-7])
def test_what_a_score_is_off_by_stays_within_the_sum_of_its_magnitudes(unit: float) -> None:
    """All q off by a factor: every score is, by at most |product|, which ``single`` counts √D
    times."""
    actual = attention_bwd(Q, K, V, DOUT, False, SCALE)
    off = attention_bwd(Q * (1 + unit), K, V, DOUT, False, SCALE)
    for name in ("dq", "dv"):
        moved = np.abs(off[name].value - actual[name].value)
        assert (moved <= abs(unit) * (actual[name].single + actual[name].lses)).all()
        assert moved.max() > 1e-3 * (abs(unit) * actual[name].single).max()


@pytest.mark.parametrize("unit", [1e-3, -1e-3])
def test_probabilities_that_are_rounded_stay_within_theirs(unit: float) -> None:
    actual = attention_bwd(Q, K, V, DOUT, False, SCALE)
    p = formulas.attention(Q, K, np.broadcast_to(np.eye(S_k), (B, G, S_k, S_k)), False, SCALE).out
    off = p * (1 + unit * np.sign(RNG.standard_normal(p.shape)))
    dv = (off.swapaxes(2, 3) @ DOUT).reshape(B, G, H // G, S_k, D_v).sum(axis=2)
    assert (np.abs(dv - actual["dv"].value) <= abs(unit) * actual["dv"].rounded * (1 + 1e-9)).all()


@pytest.mark.skipif(
    np.finfo(np.longdouble).eps >= 2.0**-53, reason="the host has nothing wider than float64"
)
def test_gradients_of_float64_are_right_to_their_last_bit_or_two() -> None:
    """Scores of several hundred: in float64 their own rounding would show in every weight that is
    not near 1."""
    rng = np.random.default_rng(5)
    q, k, v, dout = (
        size * rng.standard_normal((1, 1, n, 16))
        for n, size in ((7, 30), (90, 30), (90, 1), (7, 1))
    )
    wide = [x[0, 0].astype(np.longdouble) for x in (q, k, v, dout)]
    x = np.longdouble(0.25) * (wide[0] @ wide[1].T)
    p = np.exp(x - x.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    dx = p * (wide[3] @ wide[2].T - (wide[3] * (p @ wide[2])).sum(axis=1, keepdims=True))
    actual = attention_bwd(q, k, v, dout, False, 0.25)
    for name, expected in (
        ("dq", 0.25 * dx @ wide[1]),
        ("dk", 0.25 * dx.T @ wide[0]),
        ("dv", p.T @ wide[3]),
    ):
        assert abs(x).max() > 500
        np.testing.assert_allclose(
            actual[name].value[0, 0], expected.astype(float), rtol=2.0**-50, atol=1e-300
        )


def test_rows_that_see_nothing_take_nothing() -> None:
    variant = Variant(
        mask=np.zeros((B, H, S_q, S_k), bool), sinks=np.array([0.5, -np.inf, 3.0, -2.0])
    )
    actual = attention_bwd(Q, K, V, DOUT, False, SCALE, variant)
    for g in actual.values():
        assert all((getattr(g, part) == 0).all() for part in PARTS if part != "vanished")


def test_no_keys_and_no_queries() -> None:
    for q, k, v, dout in ((Q[:, :, :0], K, V, DOUT[:, :, :0]), (Q, K[:, :, :0], V[:, :, :0], DOUT)):
        actual = attention_bwd(q, k, v, dout, True, SCALE)
        assert {n: g.value.shape for n, g in actual.items()} == {
            "dq": q.shape,
            "dk": k.shape,
            "dv": v.shape,
        }
        assert all((g.value == 0).all() for g in actual.values())


def test_sums_of_rows_of_one_element_are_no_false_alarm() -> None:
    """A row of one element is rounded by anything up to half a unit: few rows' errors may well add
    up."""
    worst = 0.0
    for seed in range(150):
        r = np.random.default_rng(seed)
        q, dout = (r.standard_normal((1, 8, 7, 1)).astype(np.float16) for _ in range(2))
        k, v = (r.standard_normal((1, 1, 20, 1)).astype(np.float16) for _ in range(2))
        sinks = r.standard_normal(8).astype(np.float32)
        out, lse = kernelseam.attention(q, k, v, sinks=sinks, scale=1.0, return_lse=True)
        actual = kernelseam.attention_bwd(
            dout, q, k, v, out, lse, sinks=sinks, scale=1.0, sink_gradient=True
        )
        exact = attention_bwd(q, k, v, dout, False, 1.0, Variant(sinks=sinks))["dsinks"]
        bound = tolerances.gradient(exact, DType.float16, DType.float32)
        worst = max(worst, float((np.abs(actual.dsinks - exact.value) / bound).max()))
    assert 0.2 < worst < 0.9
