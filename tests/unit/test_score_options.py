"""What of users' functions is an option: bands of a mask_mod, and a score_mod that caps."""

from __future__ import annotations

from typing import Any

import kernelseam as ks
import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from kernelseam.descriptors.attention.options import names_of
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


SLOPES, BY_ENTRY = np.array([0.5, 0.25], np.float32), np.ones((2, 2), np.float32).T
PREFIXES, APART = np.array([5, 0], np.int32), np.zeros(4, np.int32)[::2]


def _falling(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s - SLOPES[h] * abs(q - kv)


def _falling_capped(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return _falling(capped(s, b, h, q, kv), b, h, q, kv)


def _behind(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s + BY_ENTRY[b, h] * (kv - q)


def _in_front(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) | (kv < PREFIXES[b])


def _in_front_near(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return _in_front(b, h, q, kv) & (q - kv < 9)


@pytest.mark.parametrize(
    ("functions", "fields", "options"),
    [
        ((_falling, None), {}, "alibi"),
        ((_falling, in_document), {}, "alibi causal expression"),
        ((_falling, _in_front), {}, "alibi causal prefix"),
        ((_behind, MASKS["causal"][0]), {}, "alibi causal"),
        ((_behind, MASKS["window"][0]), {}, "alibi window"),
        ((_behind, None), {"causal": True}, "alibi causal"),
        ((_falling_capped, None), {}, "alibi softcap"),
        ((None, _in_front), {}, "causal prefix"),
        ((None, _in_front_near), {}, "causal expression prefix"),
        # what lies ahead would lose where it gains
        ((_behind, None), {}, "expression"),
        ((_behind, _in_front), {}, "causal expression prefix"),
        ((_behind, MASKS["ahead"][0]), {}, "expression window"),
        # of another diagonal
        ((_falling, None), {"S_q": 20}, "expression"),
        ((None, _in_front), {"S_q": 20}, "expression"),
        ((None, _in_front), {"batch_invariant": True}, "batch_invariant expression"),
        # what an option changes before, or hides of the prefix
        ((_falling, None), {"bias": 0}, "bias expression"),
        ((None, _in_front), {"window": (3, 1)}, "expression window"),
        # no array for every head, or entry
        ((_falling, None), {"num_heads": 3}, "expression"),
        ((None, _in_front), {"batch": 3}, "expression"),
        ((None, lambda b, h, q, kv: (q >= kv) | (kv < APART[b])), {}, "expression"),
        # a sum that the score was changed in before
        ((lambda s, b, h, q, kv: _falling(s * 2, b, h, q, kv), None), {}, "expression"),
    ],
)  # fmt: skip
def test_what_says_alibi_or_a_prefix_is_the_option(
    functions: tuple[ScoreMod | None, MaskMod | None], fields: dict[str, Any], options: str
) -> None:
    p = problem(*functions, **fields)
    assert " ".join(sorted(names_of(p.spec.options))) == options
    arrays = [r.name for r in p.operands if r.name.startswith(("captured", "alibi", "prefix"))]
    captured = score_expression(*functions).arrays
    assert arrays == [f"captured_{i}" for i in range(len(captured))]
    if functions[0] is _falling and "alibi" in options:
        assert (p.spec.slopes, p.alibi_strides) == ("captured_0", (0, 1))
    if functions[0] is _behind and "alibi" in options:
        assert (p.spec.slopes, p.alibi_strides) == ("captured_0", (1, 2))


SIGNS = {
    "lost": lambda s, x, d: s - x * abs(d),
    "gained": lambda s, x, d: s + -x * abs(-d),
    "behind": lambda s, x, d: s + x * -d,
    "turned": lambda s, x, d: d * -x + s,
    "ahead": lambda s, x, d: s + x * d,
    "up": lambda s, x, d: s + x * abs(d),
    "from it": lambda s, x, d: x * abs(d) - s,
    "squared": lambda s, x, d: s - x * d * d,
}
"""``d``: q − kv."""


def slope_of(kind: str, array: Any, b: Any, h: Any) -> Any:
    match kind:
        case "h":
            return array[h]
        case "bh":
            return array[b, h]
        case "0h":
            return array[0, h]
        case "hh":
            return array[h, h]
    return array[1, h]


PLAIN: dict[str, Any] = {"kind": "h", "dtype": "f4", "heads": 3, "offset": 0, "prefix": "i4"}
PLAIN |= {"beside": "", "S_q": 9, "inner": None}
CHANGES = {
    "sign": [*SIGNS],
    "kind": ["bh", "0h", "1h", "hh"],
    "dtype": ["f2", "f8", "i4"],
    "heads": [2, 5],
    "offset": [1, "end"],
    "mask": ["", "to the end", "window", "prefix, near"],
    "prefix": ["i8", "u1", "apart", "short"],
    "beside": ["causal", "softcap", "alibi_slopes", "prefix_lengths", "window"],
    "S_q": [6],
    "inner": [2.0, -2.0],
}
change = st.sampled_from([(n, x) for n, xs in CHANGES.items() for x in xs])


@settings(deadline=None, max_examples=150)
@drawn(st.sampled_from(["lost", "behind"]), st.sampled_from(["causal", "prefix"]), change, change)
def test_slopes_and_prefixes_say_what_the_functions_say(
    sign: str, mask: str, first: tuple[str, Any], second: tuple[str, Any]
) -> None:
    """Whether options take them or not: of any order of terms, any array, mask and lengths."""
    x: dict[str, Any] = {
        "sign": sign,
        "mask": mask,
        "inner": None,
        **PLAIN,
        **dict([first, second]),
    }
    sign, mask, kind, prefix, inner = (x[n] for n in ("sign", "mask", "kind", "prefix", "inner"))
    draw, S_k, offset = np.random.default_rng(3), 9, x["offset"]
    rows = 2 if kind in ("bh", "1h") else 5
    shape = (x["heads"],) if kind == "h" else (rows, x["heads"])
    array = (3 * draw.standard_normal(shape)).astype(x["dtype"])
    lengths = np.array([4, 0, 7, 2])[:: 2 if prefix == "apart" else 1]
    lengths = lengths.astype("i4" if prefix in ("apart", "short") else prefix)
    lengths = lengths[:1] if prefix == "short" else lengths
    reach, to_end = np.int32(4), offset == "end"
    further = 0 if to_end else offset

    def functions(array: Any, lengths: Any) -> dict[str, Any]:
        def score(s: Any, b: Any, h: Any, q: Any, kv: Any, *, q_len: Any, kv_len: Any) -> Any:
            d = q - kv + (kv_len - q_len if to_end else further)
            s = s if inner is None else inner * np.tanh(s / inner)
            return SIGNS[sign](s, slope_of(kind, array, b, h), d)

        def seen(b: Any, h: Any, q: Any, kv: Any, *, q_len: Any, kv_len: Any) -> Any:
            match mask:
                case "causal":
                    return q >= kv
                case "to the end":
                    return kv - q <= kv_len - q_len
                case "window":
                    return (q >= kv) & (q - kv < reach)
                case "prefix":
                    return (kv < lengths[b]) | (kv <= q)
            return ((q >= kv) | (lengths[b] > kv)) & (q - kv < reach)

        return {"score_mod": score, "mask_mod": seen if mask else None}

    given: dict[str, Any] = {
        "causal": {"causal": True},
        "softcap": {"softcap": 1.5},
        "alibi_slopes": {"alibi_slopes": np.full((2, 3), 0.25, np.float32)},
        "prefix_lengths": {"prefix_lengths": np.array([2, 5], np.int32), "causal": True},
        "window": {"window": (5, 1)},
    }.get(x["beside"], {})
    q, k, v = (draw.standard_normal((2, 3, n, 8)).astype("f4") for n in (x["S_q"], S_k, S_k))
    got = ks.attention(q, k, v, **given, **functions(array, lengths))
    # behind an array's end its last element is read
    there = (np.pad(y, [(0, 5)] * y.ndim, "edge") for y in (array, lengths))
    own = {n: y for n, y in given.items() if n != "causal"}
    variant = formulas.Variant(**own, **functions(*there))
    want = formulas.attention(q, k, v, "causal" in given, 8**-0.5, None, variant).out
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_a_reach_beyond_what_a_window_takes_stays_a_function() -> None:
    p = problem(None, lambda b, h, q, kv: q - kv - 9 <= LARGEST)
    assert p.spec.expression and p.left is None
