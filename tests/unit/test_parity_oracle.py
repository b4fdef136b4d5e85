"""The oracle against the formulas written out in plain Python, one element at a time."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernelseam.oracle import formulas

NAN, INF = math.nan, math.inf


def _one_head(S_q: int = 3, S_k: int = 3) -> Any:
    rng = np.random.default_rng(2)
    return tuple(rng.standard_normal((1, 1, s, 2)) for s in (S_q, S_k, S_k))


def test_what_is_hidden_never_contributes() -> None:
    q, k, v = _one_head()
    clean = formulas.attention(q, k, v, True, 1.0)
    k[0, 0, 2], v[0, 0, 2] = NAN, INF
    actual = formulas.attention(q, k, v, True, 1.0)
    np.testing.assert_allclose(actual.out[0, 0, :2], clean.out[0, 0, :2], rtol=1e-13)
    np.testing.assert_allclose(actual.lse[0, 0, :2], clean.lse[0, 0, :2], rtol=1e-13)
    assert np.isnan(actual.out[0, 0, 2]).all()
    assert math.isnan(actual.lse[0, 0, 2])


def test_non_finite_values_reach_what_depends_on_them() -> None:
    q, k, v = _one_head()
    v[0, 0, 1, 0] = INF
    actual = formulas.attention(q, k, v, False, 1.0)
    assert (actual.out[..., 0] == INF).all()
    assert np.isfinite(actual.out[..., 1]).all()
    assert np.isfinite(actual.lse).all()
    q, k, v = _one_head()
    q[0, 0, 1, 0] = NAN
    actual = formulas.attention(q, k, v, False, 1.0)
    assert np.isnan(actual.out[0, 0]).all(axis=1).tolist() == [False, True, False]


def test_scores_of_minus_infinity() -> None:
    q, k, v = _one_head()
    q[...] = np.abs(q) + 1
    k[0, 0, 1] = -INF
    actual = formulas.attention(q, k, v, False, 1.0)
    expected = formulas.attention(q, k[:, :, [0, 2]], v[:, :, [0, 2]], False, 1.0)
    np.testing.assert_allclose(actual.out, expected.out, rtol=1e-14)
    np.testing.assert_allclose(actual.products, expected.products, rtol=1e-14)
    k[...] = -INF
    actual = formulas.attention(q, k, v, False, 1.0)
    assert (
        (actual.out == 0).all()
        and (actual.lse == -INF).all()
        and (actual.pv == 0).all()
        and (actual.products == 0).all()
    )


def test_no_keys_and_no_queries() -> None:
    actual = formulas.attention(
        np.ones((1, 2, 3, 4)), np.ones((1, 2, 0, 4)), np.ones((1, 2, 0, 5)), False, 1.0
    )
    assert (
        actual.out.shape == (1, 2, 3, 5) and (actual.out == 0).all() and (actual.lse == -INF).all()
    )
    for lead, S_q in ((1, 0), (0, 3)):
        k, v = np.ones((lead, 1, 3, 4)), np.ones((lead, 1, 3, 5))
        assert formulas.attention(np.ones((lead, 2, S_q, 4)), k, v, True, 1.0).out.shape == (
            lead,
            2,
            S_q,
            5,
        )


def test_inputs_count_as_they_were_rounded() -> None:
    q, k, v = (x.astype(ml_dtypes.bfloat16) for x in _one_head())
    actual = formulas.attention(q, k, v, False, 1.0)
    expected = formulas.attention(
        q.astype(np.float64), k.astype(np.float64), v.astype(np.float64), False, 1.0
    )
    np.testing.assert_array_equal(actual.out, expected.out)


@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
def test_gemm_is_the_formula(a_transposed: bool, b_transposed: bool) -> None:
    rng = np.random.default_rng(3)
    B, H, G, M, N, K = 2, 4, 2, 3, 4, 5
    a = rng.standard_normal((B, H, K, M) if a_transposed else (B, H, M, K))
    b = rng.standard_normal((B, G, N, K) if b_transposed else (B, G, K, N))
    c = rng.standard_normal((B, H, M, N))
    actual = formulas.gemm(a, b, c, 0.5, -2.0, a_transposed, b_transposed)
    rows = [0, 2, 11, 13, 23]
    part = formulas.gemm(a, b, c, 0.5, -2.0, a_transposed, b_transposed, rows)
    for i, h, m, n in np.ndindex(B, H, M, N):
        left = [a[i, h, k, m] if a_transposed else a[i, h, m, k] for k in range(K)]
        right = [b[i, h // 2, n, k] if b_transposed else b[i, h // 2, k, n] for k in range(K)]
        terms = [float(x * y) for x, y in zip(left, right, strict=True)]
        assert actual.out[i, h, m, n] == pytest.approx(
            0.5 * sum(terms) - 2 * c[i, h, m, n], rel=1e-12, abs=1e-14
        )
        magnitude = 0.5 * sum(map(abs, terms)) + 2 * abs(c[i, h, m, n])
        assert actual.magnitude[i, h, m, n] == pytest.approx(magnitude, rel=1e-12)
    np.testing.assert_allclose(part.out, actual.out.reshape(24, N)[rows], rtol=1e-13)
    np.testing.assert_allclose(part.magnitude, actual.magnitude.reshape(24, N)[rows], rtol=1e-13)


@pytest.mark.parametrize("rows", [None, [0, 1]])
def test_gemm_edges(rows: list[int] | None) -> None:
    a, b, c = np.full((1, 1, 2, 3), NAN), np.full((1, 1, 3, 2), INF), np.full((1, 1, 2, 2), 4.0)
    assert formulas.gemm(a, b, c, 0.0, 0.5, rows=rows).out.ravel().tolist() == [2.0] * 4
    assert (
        formulas.gemm(a[..., :0], b[:, :, :0], c, 1.0, 0.5, rows=rows).out.ravel().tolist()
        == [2.0] * 4
    )
    assert (
        formulas.gemm(a, b, np.full((1, 1, 2, 2), NAN), 0.0, 0.0, rows=rows).out.ravel().tolist()
        == [0.0] * 4
    )
    assert np.isnan(formulas.gemm(a, b, None, 1.0, 0.0, rows=rows).out).all()
    a[...], b[...] = 1.0, 2.0
    a[0, 0, 1, 1], b[0, 0, 1, 0] = INF, 0.0
    actual = formulas.gemm(a, b, None, 1.0, 0.0, rows=rows).out.ravel()
    assert actual.tolist()[:2] == [4.0, 6.0] and math.isnan(actual[2]) and actual[3] == INF


@pytest.mark.parametrize(("batch_group", "head_group"), [(1, 1), (2, 1), (1, 3), (2, 2), (4, 6)])
def test_summed_gemms_are_the_formula(batch_group: int, head_group: int) -> None:
    """Bias and residual as well; the magnitude is the same sum of magnitudes."""
    rng = np.random.default_rng(6)
    B, H, g, M, N, K = 4, 6, 2, 3, 2, 5
    lead = (B // batch_group, H // head_group)
    a, b, bias, residual = (
        rng.standard_normal(s).astype(np.float32)
        for s in ((B, H, M, K), (B, H // g, K, N), (*lead, N), (*lead, M, N))
    )
    more = {
        "bias": bias,
        "residual": residual,
        "batch_group": batch_group,
        "head_group": head_group,
    }
    actual = formulas.gemm(a, b, None, -0.5, **more)  # type: ignore[arg-type]
    rows = [0, 2, lead[0] * lead[1] * M - 1]
    part = formulas.gemm(a, b, None, -0.5, rows=rows, **more)  # type: ignore[arg-type]
    assert actual.out.shape == (*lead, M, N)
    for i, j, m, n in np.ndindex(*actual.out.shape):
        terms = [
            float(a[p, h, m, k]) * float(b[p, h // g, k, n])
            for p in range(B)
            for h in range(H)
            for k in range(K)
            if p // batch_group == i and h // head_group == j
        ]
        added = [float(bias[i, j, n]), float(residual[i, j, m, n])]
        assert actual.out[i, j, m, n] == pytest.approx(
            -0.5 * sum(terms) + sum(added), rel=1e-11, abs=1e-13
        )
        magnitude = 0.5 * sum(map(abs, terms)) + sum(map(abs, added))
        assert actual.magnitude[i, j, m, n] == pytest.approx(magnitude, rel=1e-12)
    for name in ("out", "magnitude"):
        np.testing.assert_allclose(
            getattr(part, name), getattr(actual, name).reshape(-1, N)[rows], rtol=1e-12
        )


def test_gemm_needs_c_where_beta_reads_it() -> None:
    with pytest.raises(ValueError, match="beta is not 0: C is needed"):
        formulas.gemm(np.ones((1, 1, 1, 1)), np.ones((1, 1, 1, 1)), None, 1.0, 1.0)


def test_sampled_row_numbers() -> None:
    assert formulas.sample_rows(10, 10) is None
    rows = formulas.sample_rows(1000, 20)
    assert rows is not None
    assert (
        len(set(rows.tolist())) == 20
        and rows[0] == 0
        and rows[-1] == 999
        and (np.diff(rows) > 0).all()
    )
