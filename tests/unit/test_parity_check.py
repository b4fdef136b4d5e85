"""Bounds and verdicts: numbers, classes of non-finite values, places and messages."""

from __future__ import annotations

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from kernelseam.dtypes import E4M3, DType
from kernelseam.oracle import check, formulas, tolerances
from kernelseam.samples.data import attention as attention_data

NAN, INF = math.nan, math.inf


def test_gemm_bound_is_the_formula() -> None:
    result = formulas.GemmResult(np.array([[3.0]]), np.array([[7.0]]))
    half = tolerances.gemm(result, 96, DType.float16, DType.float16)
    assert half[0, 0] == pytest.approx(2 * 2**-11 * 3 + 4 * 10 * 2**-24 * 7 + 2**-24, rel=1e-14)
    wide = tolerances.gemm(result, 96, DType.bfloat16, DType.float32, zero_mean=False)
    assert wide[0, 0] == pytest.approx(2 * 2**-24 * 3 + 4 * 100 * 2**-24 * 7 + 2.0**-149, rel=1e-14)
    double = tolerances.gemm(result, 96, DType.float64, DType.float64)
    assert double[0, 0] == pytest.approx(2 * 2**-53 * 3 + 4 * 10 * 2**-53 * 7, rel=1e-14)
    flushed = tolerances.gemm(result, 96, DType.float16, DType.float16, flushed=True)
    assert flushed[0, 0] - half[0, 0] == pytest.approx(2**-14 - 2**-24, rel=1e-12)


def test_attention_bound_is_the_formula() -> None:
    out, lse, pv, products, values = (
        np.array(x) for x in ([[0.5]], [2.0], [[0.8]], [3.0], [[5.0]])
    )
    largest, changes = np.array([0.25]), np.array([0.0])
    result = formulas.AttentionResult(out, lse, pv, products, largest, values, pv, changes)
    inner = 8 * 2**-24 * (10 + 8 * 3)
    actual, got_lse = tolerances.attention(result, 100, 64, DType.bfloat16, DType.bfloat16)
    assert actual[0, 0] == pytest.approx(
        2 * 2**-8 * 0.5 + (2**-8 + inner) * 0.8 + 2.0**-133 * 6, rel=1e-14
    )
    assert got_lse[0] == pytest.approx(8 * 2**-24 * (10 + 8 * 3 + 2), rel=1e-14)
    actual, _ = tolerances.attention(result, 100, 64, DType.float16, DType.float32, flushed=True)
    assert actual[0, 0] == pytest.approx(
        2 * 2**-24 * 0.5 + (2**-11 + inner) * 0.8 + 2**-14 * 5 + 2.0**-126, rel=1e-14
    )
    result = replace(result, spread=np.array([[0.6, 0.6]]))
    for stored in E4M3:
        actual, got_lse = tolerances.attention(result, 100, 64, stored, DType.bfloat16)
        cut, scores = 8 * 2**-13, 2**-13 * (8 * 3 + 3 * 8 * 0.25)
        assert actual[0, 0] == pytest.approx(
            2 * 2**-8 * 0.5 + (2**-4 + scores) * 0.6 + (cut + inner) * 0.8 + 2**-15 * 5, rel=1e-12
        )
        assert got_lse[0] == pytest.approx(8 * 2**-24 * (10 + 8 * 3 + 2) + scores, rel=1e-12)
    actual, got_lse = tolerances.attention(result, 100, 64, DType.float64, DType.float64)
    assert actual[0, 0] == pytest.approx(2**-53 * (1 + (1 + 8 * 34) * 0.8), rel=1e-14)
    assert got_lse[0] == pytest.approx(8 * 2**-53 * 36, rel=1e-14)


def test_changed_scores_widen_the_attention_bound() -> None:
    out, lse, pv, products, values = (
        np.array(x) for x in ([[0.5]], [2.0], [[0.8]], [3.0], [[5.0]])
    )
    plain, changed = (
        formulas.AttentionResult(out, lse, pv, products, products, values, pv, np.array([t]))
        for t in (0.0, 20.0)
    )
    for (actual, got_lse), (before, before_lse) in [
        (tolerances.attention(changed, 100, 64, d, d), tolerances.attention(plain, 100, 64, d, d))
        for d in (DType.float16, DType.float32)
    ]:
        assert (actual - before)[0, 0] == pytest.approx(8 * 2**-24 * 20 * 0.8, rel=1e-10)
        assert (got_lse - before_lse)[0] == pytest.approx(8 * 2**-24 * 20, rel=1e-10)


def test_merge_bound_is_the_formula() -> None:
    result = formulas.MergeResult(
        np.array([[0.5]]), np.array([2.0]), np.array([[0.8]]), np.array([7.0])
    )
    actual, got_lse = tolerances.merge_states(result, 9, DType.float32, DType.float16)
    assert actual[0, 0] == pytest.approx(
        2 * 2**-11 * 0.5 + 8 * 2**-24 * (3 + 7) * 0.8 + 2**-24, rel=1e-14
    )
    assert got_lse[0] == pytest.approx(8 * 2**-24 * (3 + 7 + 2), rel=1e-14)
    flushed, _ = tolerances.merge_states(result, 9, DType.float32, DType.float16, flushed=True)
    assert flushed[0, 0] - actual[0, 0] == pytest.approx(2**-14 - 2**-24, rel=1e-10)
    actual, got_lse = tolerances.merge_states(result, 9, DType.float64, DType.float64)
    assert actual[0, 0] == pytest.approx(2**-53 * (1 + 8 * 10 * 0.8), rel=1e-14)
    assert got_lse[0] == pytest.approx(8 * 2**-53 * 12, rel=1e-14)


def test_verdicts_of_a_variant_and_of_merged_states() -> None:
    q, k, v, _, _ = _attention()
    variant = formulas.Variant(window=(2, 0), sinks=np.array([0.5, 1.0, -np.inf]))
    expected = formulas.attention(q, k, v, False, 8**-0.5, None, variant)
    out, lse = expected.out.astype(np.float32), expected.lse.astype(np.float32)
    outcome = check.attention(q, k, v, out, lse, causal=False, variant=variant)
    assert outcome.passed and outcome.checked == out.size + lse.size
    assert not check.attention(q, k, v, out, lse, causal=False).passed
    parts = [
        formulas.attention(q, k[:, :, a:b], v[:, :, a:b], False, 8**-0.5)
        for a, b in ((0, 3), (3, 7))
    ]
    outs, lses = (
        np.stack([getattr(x, n) for x in parts]).astype(np.float32) for n in ("out", "lse")
    )
    whole = formulas.attention(q, k, v, False, 8**-0.5)
    out, lse = whole.out.astype(np.float32), whole.lse.astype(np.float32)
    assert check.merge_states(outs, lses, out, lse).passed
    lse[1, 2, 4] += 1e-3
    outcome = check.merge_states(outs, lses, out, lse)
    assert (
        not outcome.passed
        and outcome.where == (1, 2, 4)
        and outcome.message.startswith("lse[1, 2, 4] is ")
    )


@pytest.mark.parametrize(
    ("dtype", "last"), [(DType.float16, 65519.99), (DType.float32, 3.4028235677973366e38)]
)
def test_where_a_dtype_overflows(dtype: DType, last: float) -> None:
    assert tolerances.overflows_at(dtype) == pytest.approx(last, rel=1e-6)
    assert np.isfinite(np.float64(np.finfo(dtype.numpy).max).astype(dtype.numpy))


@pytest.mark.parametrize(
    ("actual", "expected", "ratio"),
    [
        (1.0, 1.5, 0.5),
        (1.0, 4.0, 3.0),
        (NAN, 1.0, INF),
        (INF, 1.0, INF),
        (1.0, NAN, INF),
        (INF, NAN, INF),
        (NAN, NAN, 0.0),
        (INF, INF, 0.0),
        (-INF, INF, INF),
        (NAN, INF, INF),
        (5e4, INF, INF),
        (INF, 99.5, 0.0),
        (-INF, 99.5, INF),
        (INF, 98.0, INF),
        (99.0, 99.5, 0.5),
        (-INF, -120.0, 0.0),
    ],
)
def test_ratio_of_one_element(actual: float, expected: float, ratio: float) -> None:
    outcome = check.ratios(np.array([actual]), np.array([expected]), np.array([1.0]), 100.0)
    assert outcome.tolist() == [ratio]


def _attention(S_k: int = 7) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 3, s, 8)).astype(np.float32) for s in (5, S_k, S_k))
    result = formulas.attention(q, k, v, False, 8**-0.5)
    return q, k, v, result.out.astype(np.float32), result.lse.astype(np.float32)


def test_attention_verdict_passes_and_says_how_well() -> None:
    q, k, v, out, lse = _attention()
    verdict = check.attention(q, k, v, out, lse, causal=False)
    assert verdict.passed and bool(verdict)
    assert 0 < verdict.worst < 0.1
    assert verdict.checked == out.size + lse.size
    assert f"error/tolerance {verdict.worst:.3g}" in verdict.message


@pytest.mark.parametrize(("name", "where"), [("out", (1, 2, 4, 3)), ("lse", (0, 1, 2))])
def test_attention_verdict_names_the_place(name: str, where: tuple[int, ...]) -> None:
    q, k, v, out, lse = _attention()
    {"out": out, "lse": lse}[name][where] += 0.5
    for rows in (None, range(30)):
        verdict = check.attention(q, k, v, out, lse, causal=False, scale=8**-0.5, rows=rows)
        assert not verdict.passed
        assert verdict.where == where
        assert verdict.message.startswith(f"{name}{list(where)} is ")
    assert check.attention(
        q, k, v, out, lse, causal=False, rows=[0, 29 if name == "lse" else 28]
    ).passed


def test_a_result_that_was_not_written_fails_at_infinity() -> None:
    q, k, v, out, _ = _attention()
    out[0, 0, 3] = NAN
    verdict = check.attention(q, k, v, out, causal=False)
    assert (verdict.passed, verdict.worst, verdict.where) == (False, INF, (0, 0, 3, 0))
    assert verdict.message.startswith("out[0, 0, 3, 0] is nan, the oracle says ")


def test_rows_may_be_a_number_of_rows() -> None:
    q, k, v, out, lse = _attention()
    assert check.attention(q, k, v, out, lse, causal=False, rows=4).checked == 4 * 9
    out[1, 2, 4] = 9  # the last row is always among them
    assert check.attention(q, k, v, out, lse, causal=False, rows=4).where[:3] == (1, 2, 4)


def test_a_result_of_another_shape_is_refused() -> None:
    q, k, v, out, _ = _attention()
    with pytest.raises(
        ValueError, match=r"out has shape \(2, 5, 3, 8\), the problem's rows are \(2, 3, 5\)"
    ):
        check.attention(q, k, v, out.swapaxes(1, 2), causal=False)


def test_an_empty_result_passes() -> None:
    nothing = np.ones((0, 1, 2, 4))
    verdict = check.attention(nothing, nothing, nothing, nothing, causal=True)
    assert (verdict.passed, verdict.worst, verdict.checked) == (True, 0.0, 0)
    assert verdict.message == "nothing to compare: the result is empty"


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_gemm_of_two_to_four_axes(lead: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    a, b, c = (
        rng.standard_normal((*lead, *s)).astype(np.float16) for s in ((5, 4), (6, 5), (4, 6))
    )
    out = (
        0.5 * (a.astype(np.float64).swapaxes(-1, -2) @ b.astype(np.float64).swapaxes(-1, -2)) + c
    ).astype(np.float16)
    options = {"alpha": 0.5, "beta": 1.0, "a_transposed": True, "b_transposed": True}
    verdict = check.gemm(a, b, out, c, **options)  # type: ignore[arg-type]
    assert verdict.passed and verdict.checked == out.size and 0 < verdict.worst <= 0.5
    out[..., 3, 5] += np.float16(1)
    verdict = check.gemm(a, b, out, c, **options)  # type: ignore[arg-type]
    assert (
        not verdict.passed and verdict.where[-2:] == (3, 5) and len(verdict.where) == len(lead) + 2
    )
    assert verdict.message.startswith(f"C{list(verdict.where)} is ")


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_what_is_added_to_a_gemm_widens_its_bound(lead: tuple[int, ...]) -> None:
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal((*lead, *s)).astype(np.float32) for s in ((4, 5), (5, 6)))
    bias, residual = (
        1e4 * rng.standard_normal((*lead, *s)).astype(np.float32) for s in ((6,), (4, 6))
    )
    out = (a.astype(np.float64) @ b + bias[..., None, :] + residual).astype(np.float32)
    assert check.gemm(a, b, out, bias=bias, residual=residual).passed
    assert not check.gemm(a, b, out, bias=bias).passed
    kept = tolerances.gemm(formulas.GemmResult(out, np.abs(out)), 5, DType.float32, DType.float32)
    out[..., 2, 3] += 0.5 * kept[..., 2, 3]
    assert check.gemm(a, b, out, bias=bias, residual=residual).passed
    out[..., 2, 3] += 1.0
    assert check.gemm(a, b, out, bias=bias, residual=residual).where[-2:] == (2, 3)


def test_sums_count_the_terms_of_all_products() -> None:
    a, b = np.ones((4, 6, 1, 100), np.float32), np.ones((4, 3, 100, 1), np.float32)
    out = np.full((2, 2, 1, 1), 600.0, np.float32)
    groups = {"batch_group": 2, "head_group": 3}
    assert check.gemm(a, b, out, **groups).passed  # type: ignore[arg-type]
    bound = 2 * 2**-24 * 600 + 4 * math.sqrt(604) * 2**-24 * 600
    for part, passed in ((0.9, True), (1.1, False)):
        off = np.array(out, np.float64)
        off[1, 1] += part * bound
        assert check.gemm(a, b, off.astype(np.float32), **groups).passed is passed  # type: ignore[arg-type]


def test_exact_means_bit_for_bit() -> None:
    a = np.full((1, 129), 3, np.float32).astype(ml_dtypes.bfloat16)
    # 1161 rounds to 1160
    out = (a.astype(np.float64) @ a.astype(np.float64).T).astype(ml_dtypes.bfloat16)
    assert float(out[0, 0]) == 1160.0
    assert check.gemm(a, a, out, b_transposed=True, exact=True).worst == 0
    out[0, 0] = 1168
    verdict = check.gemm(a, a, out, b_transposed=True, exact=True)
    assert (verdict.passed, verdict.worst) == (False, INF)
    # within the bound, for data that is no small integer
    assert check.gemm(a, a, out, b_transposed=True).passed


def test_overflowing_results_may_be_infinite() -> None:
    a = np.full((1, 2), 250, np.float16)
    exact = 2 * 250.0 * 250.0
    assert exact > 65520
    assert check.gemm(a, a, np.array([[np.inf]], np.float16), b_transposed=True).passed
    assert not check.gemm(a, a, np.array([[-np.inf]], np.float16), b_transposed=True).passed
    assert not check.gemm(a, a, np.array([[65504]], np.float16), b_transposed=True).passed


def test_random_data_alone_lets_a_dropped_key_pass_and_the_ramp_does_not() -> None:
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((1, 1, s, 64)) for s in (1, 4096, 4096))
    actual = []
    for on_ramp in (False, True):
        if on_ramp:
            attention_data.ramp(q, k)
        Q, K, V = (x.astype(ml_dtypes.bfloat16) for x in (q, k, v))
        short = formulas.attention(Q, K[:, :, :-1], V[:, :, :-1], False, 0.125).out.astype(
            ml_dtypes.bfloat16
        )
        actual.append(check.attention(Q, K, V, short, causal=False).passed)
    assert actual == [True, False]
