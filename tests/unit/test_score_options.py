"""What of users' functions is an option: bands of a mask_mod, and a score_mod that caps."""

from __future__ import annotations

from typing import Any

import kernelseam as ks
import numpy as np
import pytest
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.expressions.scores import MaskMod, ScoreMod, score_expression
from kernelseam.oracle import formulas

REACH, LARGEST = np.int32(7), np.int32(2**31 - 1)
OWN = np.arange(300) // 40


def capped(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return 3.0 * np.tanh(s / 3.0)


def cap(c: Any) -> ScoreMod:
    return lambda s, b, h, q, kv: c * np.tanh(s / c)


def near(reach: Any) -> MaskMod:
    return lambda b, h, q, kv: abs(q - kv) <= reach


def in_document(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (OWN[q] == OWN[kv])


def to_the_end(b: Any, h: Any, q: Any, kv: Any, *, q_len: Any, kv_len: Any) -> Any:
    return kv - q <= kv_len - q_len


def window_to_the_end(b: Any, h: Any, q: Any, kv: Any, *, q_len: Any, kv_len: Any) -> Any:
    return abs(q + kv_len - q_len - kv) < REACH


def problem(
    score: ScoreMod | None = None, mask: MaskMod | None = None, *, S_q: int = 30, **fields: Any
) -> AttentionProblem:
    plain: dict[str, Any] = {"batch": 2, "num_heads": 2, "S_k": 30, "head_dim": 16}
    plain |= {"S_q": S_q, "dtype": "float32", "expression": score_expression(score, mask)}
    return ks.Attention(**(plain | fields)).problem()


MASKS: dict[str, tuple[MaskMod, tuple[int | None, int | None]]] = {
    "causal": (lambda b, h, q, kv: q >= kv, (None, 0)),
    "ahead": (lambda b, h, q, kv: kv < q + 3, (None, 2)),
    "window": (lambda b, h, q, kv: (q >= kv) & (q - kv <= 9), (9, 0)),
    "both sides": (lambda b, h, q, kv: abs(kv - q) < REACH, (6, 6)),
    "the nearer": (lambda b, h, q, kv: (q - kv <= 9) & (q - kv < 5), (4, None)),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_band_is_a_window_where_queries_and_keys_are_as_many(name: str) -> None:
    mask, (left, right) = MASKS[name]
    p = problem(None, mask)
    assert (p.left, p.right, p.spec.expression, p.captured_numbers) == (left, right, None, ())
    assert (p.spec.causal, p.spec.window) == (name == "causal", name != "causal")
    for other in (problem(None, mask, S_q=20), problem(None, mask, batch_invariant=True)):
        assert (other.left, other.right) == (None, None) and other.spec.expression


@pytest.mark.parametrize("S_q", [30, 7])
def test_a_band_that_ends_with_the_last_key_is_one_for_all_lengths(S_q: int) -> None:
    p = problem(None, to_the_end, S_q=S_q, batch_invariant=True)
    assert p.spec.causal and p.spec.expression is None
    p = problem(None, window_to_the_end, S_q=S_q)
    assert (p.left, p.right, p.spec.expression) == (6, 6, None)


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, kv: q > kv,  # hides the diagonal: right would be negative
        lambda b, h, q, kv: (q >= kv) | (kv < 4),
        lambda b, h, q, kv: q - kv < h,
        lambda b, h, q, kv: 2 * q >= kv,
        lambda b, h, q, kv: q // 2 >= kv // 2,
        lambda b, h, q, kv: q + kv < 9,
        lambda b, h, q, kv: kv < 9,
    ],
)
def test_other_masks_stay_expressions(mask: MaskMod) -> None:
    p = problem(None, mask)
    assert p.spec.expression and not (p.spec.causal or p.spec.window)


def test_what_is_left_keeps_its_numbers_and_arrays() -> None:
    p = problem(capped, in_document)
    assert p.spec.causal and p.spec.softcap and p.softcap == 3.0
    assert p.spec.expression and p.captured_extents == ((300,),)
    assert "softcap" not in p.spec.expression and "le BOOLEAN" not in p.spec.expression


def test_the_nearer_end_of_a_band_and_of_an_option_counts() -> None:
    p = problem(None, MASKS["window"][0], window=(4, 2))
    assert (p.left, p.right) == (4, 0)
    p = problem(None, MASKS["both sides"][0], causal=True)
    assert (p.left, p.right, p.spec.window) == (6, 0, True)


def test_a_cap_is_the_options_where_nothing_changes_scores_before() -> None:
    assert problem(capped).spec.expression is None
    whole = problem(cap(np.int32(3)))
    assert (whole.spec.expression, whole.softcap, type(whole.softcap)) == (None, 3.0, float)
    slopes = {"alibi_slopes": np.ones((2, 2), np.float32)}
    for before in (slopes, {"softcap": 2.0}):
        assert problem(capped, **before).spec.expression
    other = problem(lambda s, b, h, q, kv: -3.0 * np.tanh(s / -3.0))
    assert other.spec.expression and not other.spec.softcap


def test_a_prefix_keeps_the_band_that_hides_of_it() -> None:
    lengths = np.full(2, 5, np.int32)
    p = problem(None, MASKS["window"][0], prefix_lengths=lengths, causal=True)
    assert p.spec.expression and p.left is None


@pytest.mark.parametrize("S_q", [30, 21])
@pytest.mark.parametrize("name", [*MASKS, "documents", "to the end"])
def test_results_are_those_of_the_functions(name: str, S_q: int) -> None:
    mask = {"documents": in_document, "to the end": to_the_end}.get(name) or MASKS[name][0]
    draw = np.random.default_rng(0)
    q, k, v = (draw.standard_normal((2, 2, n, 16)).astype("f4") for n in (S_q, 30, 30))
    got = ks.attention(q, k, v, layout="bhsd", score_mod=capped, mask_mod=mask)
    variant = formulas.Variant(score_mod=capped, mask_mod=mask)
    want = formulas.attention(q, k, v, False, 0.25, None, variant).out
    assert np.abs(got - want).max() < 1e-5


def test_another_reach_is_no_other_spec() -> None:
    def mask(n: int) -> MaskMod:
        return lambda b, h, q, kv: (q >= kv) & (q - kv < n)

    assert len({problem(None, mask(n)).spec for n in (3, 9)}) == 1


@pytest.mark.parametrize("S_q", [30, 21])
@pytest.mark.parametrize("mask", [None, MASKS["causal"][0], to_the_end])
def test_gradients_by_scores_are_by_what_the_function_returned(
    mask: MaskMod | None, S_q: int
) -> None:
    """Also where options say all that the functions do."""
    draw = np.random.default_rng(1)
    q, k, v, dout = (draw.standard_normal((2, 2, n, 16)).astype("f4") for n in (S_q, 30, 30, S_q))
    functions: dict[str, Any] = {"score_mod": capped, "mask_mod": mask}
    out, lse = ks.attention(q, k, v, return_lse=True, **functions)
    made = ks.attention_bwd(dout, q, k, v, out, lse, score_gradient=True, **functions)
    i, j = np.arange(S_q)[:, None], np.arange(30)
    seen: Any = True
    if mask is not None:
        lengths = {"q_len": S_q, "kv_len": 30} if mask is to_the_end else {}
        seen = mask(0, 0, i, j, **lengths)
    scores = capped(q @ k.swapaxes(2, 3) * 0.25, 0, 0, i, j)
    weights = np.where(seen, np.exp(scores - lse[..., None]), 0)
    want = weights * (dout @ v.swapaxes(2, 3) - (dout * out).sum(3, keepdims=True))
    assert np.abs(made.dscores - want).max() < 1e-5
    plain = ks.attention_bwd(dout, q, k, v, out, lse, **functions)
    for x, y in zip(made[:3], plain[:3], strict=True):
        assert np.abs(x - y).max() < 1e-5


@pytest.mark.parametrize("S_q", [30, 21])
def test_whether_a_bias_has_a_gradient_does_not_depend_on_lengths(S_q: int) -> None:
    q, k, v = (np.ones((1, 1, n, 16), np.float32) for n in (S_q, 30, 30))
    given: dict[str, Any] = {"bias": np.ones((S_q, 30), np.float32)}
    given["mask_mod"] = MASKS["causal"][0]
    out, lse = ks.attention(q, k, v, return_lse=True, **given)
    with pytest.raises(ks.errors.InvalidValue, match="of an attention with a score_mod or a mask"):
        ks.attention_bwd(out, q, k, v, out, lse, bias_gradient=True, **given)


@pytest.mark.parametrize(
    "functions",
    [
        *({"mask_mod": near(np.int32(n))} for n in (0, 9, -1, -3, 2**31 - 1)),
        *({"score_mod": cap(np.float32(c))} for c in (2.5, 0.0, -3.0, np.inf, np.nan)),
        {"score_mod": cap(np.int32(2))},
    ],
)
def test_numbers_that_no_option_takes_say_what_the_function_says(
    functions: dict[str, Any],
) -> None:
    draw = np.random.default_rng(2)
    q, k, v = (draw.standard_normal((1, 1, 18, 8)).astype("f4") for _ in range(3))
    with np.errstate(all="ignore"):
        got = ks.attention(q, k, v, **functions)
        variant = formulas.Variant(**functions)
        want = formulas.attention(q, k, v, False, 8**-0.5, None, variant).out
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_reach_beyond_what_a_window_takes_stays_a_function() -> None:
    p = problem(None, lambda b, h, q, kv: q - kv - 9 <= LARGEST)
    assert p.spec.expression and p.left is None
