"""Attention with a score_mod and a mask_mod on arrays and in descriptors: NumPy's reference against
the functions themselves in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import kernelseam as ks
import numpy as np
import pytest
from kernelseam import planning
from kernelseam.bundling.traces import read_trace
from kernelseam.descriptors import Attention, AttentionBwd
from kernelseam.errors import InvalidValue
from kernelseam.expressions.scores import score_expression
from kernelseam.expressions.text import structure_of, text_of
from kernelseam.oracle import check
from kernelseam.oracle.formulas import Variant
from kernelseam.oracle.user_functions import called
from kernelseam.samples.mods import MODS, Extents
from refusals import Refused

B, H, G, S, L, D = 2, 4, 2, 21, 33, 16


def drawn(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def inputs() -> tuple[Any, Any, Any]:
    return drawn(B, H, S, D), drawn(B, G, L, D, seed=1), drawn(B, G, L, D, seed=2)


def decayed(slopes: Any) -> Callable[..., Any]:
    return lambda s, b, h, i, j: s - slopes[h] * abs(i - j)


def near(w: int) -> Callable[..., Any]:
    return lambda b, h, i, j: abs(i - j) < w


def test_dense() -> None:
    q, k, v = inputs()
    mods = decayed(drawn(H)), near(9)
    out, lse = ks.attention(q, k, v, score_mod=mods[0], mask_mod=mods[1], return_lse=True)
    variant = Variant(score_mod=mods[0], mask_mod=mods[1])
    assert check.attention(q, k, v, out, lse, causal=False, variant=variant)
    wrong = Variant(score_mod=mods[0], mask_mod=near(8))
    assert not check.attention(q, k, v, out, lse, causal=False, variant=wrong)


def test_of_heads_alone() -> None:
    """The oracle hands over arrays: ~ of Python's truth is true, its integers raise by 0."""
    q, k, v = inputs()
    mask: Callable[..., Any] = lambda b, h, i, j: ~(h > 1) & (7 // h < 5)  # noqa: E731
    out, lse = ks.attention(q, k, v, mask_mod=mask, return_lse=True)
    assert np.isneginf(lse[:, 1:]).all()
    assert check.attention(q, k, v, out, lse, causal=False, variant=Variant(mask_mod=mask))


def test_with_the_other_options() -> None:
    """The score_mod gets what they make of scale·q·k; the mask_mod is one more mask."""
    q, k, v = inputs()
    mod, slopes = decayed(drawn(H)), np.linspace(0.1, 0.4, H).astype(np.float32)
    options: dict[str, Any] = {"alibi_slopes": slopes, "softcap": 2.0}
    out = ks.attention(q, k, v, score_mod=mod, mask_mod=near(30), causal=True, **options)
    options["alibi_slopes"] = np.broadcast_to(slopes, (B, H))
    variant = Variant(score_mod=mod, mask_mod=near(30), **options)
    assert check.attention(q, k, v, out, causal=True, variant=variant)


def test_packed_and_paged_indices_are_logical() -> None:
    """They count from 0 within a sequence's own queries and keys, whatever memory holds them."""
    lengths, keys = [3, 8], [7, 12]
    q, k, v = drawn(sum(lengths), H, D), *(drawn(sum(keys), G, D, seed=n) for n in (1, 2))
    offsets = [np.cumsum([0, *x]).astype(np.int32) for x in (lengths, keys)]
    table = drawn(H, 12)

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any, *, kv_len: Any) -> Any:
        return s + table[h, j] * (kv_len - i) + b

    def mask(b: Any, h: Any, i: Any, j: Any, *, q_len: Any, kv_len: Any) -> Any:
        return j - i <= kv_len - q_len

    mods: dict[str, Any] = {"score_mod": mod, "mask_mod": mask}
    got = ks.attention_varlen(q, k, v, *offsets, 8, 12, **mods)
    pages = [np.zeros((5, 4, G, D), np.float32) for _ in range(2)]
    block_table, place = np.array([[3, 0, -1], [4, 1, 2]], np.int32), 0
    for b, n in enumerate(keys):
        for j in range(n):
            page = block_table[b, j // 4]
            pages[0][page, j % 4], pages[1][page, j % 4] = k[place], v[place]
            place += 1
    kv_lengths = np.array(keys, np.int32)
    more = {"cu_seqlens_q": offsets[0], "max_seqlen_q": 8, "causal": False}
    paged = ks.attention_paged(q, *pages, block_table, kv_lengths, **more, **mods)
    np.testing.assert_allclose(paged, got, rtol=2e-6, atol=2e-6)
    for b in range(2):
        rows, columns = (slice(o[b], o[b + 1]) for o in offsets)
        own = [x[None].swapaxes(1, 2) for x in (q[rows], k[columns], v[columns])]
        # A batch of one: the function sees b = 0, and is told by how much it differs.
        variant = Variant(
            score_mod=lambda s, _, h, i, j, *, kv_len, b=b: mod(s, b, h, i, j, kv_len=kv_len),
            mask_mod=mask,
        )
        out = got[rows][None].swapaxes(1, 2)
        assert check.attention(*own, out, causal=False, variant=variant)


def test_a_mask_hides_and_a_score_does_not() -> None:
    q, k, v = inputs()
    v[:, :, 5] = np.nan
    masked = ks.attention(q, k, v, mask_mod=lambda b, h, i, j: j != 5)
    assert np.isfinite(masked).all()
    minus = ks.attention(q, k, v, score_mod=lambda s, b, h, i, j: ks.where(j == 5, -np.inf, s))
    assert np.isnan(minus).all()


def test_captured_arrays_are_empty_where_nothing_is_computed(refused: Refused) -> None:
    q, k, v = inputs()
    bias = np.zeros((B, H, 0, L), np.float32)
    mod = lambda s, b, h, i, j: s + bias[b, h, i, j]  # noqa: E731
    assert ks.attention(q[:, :, :0], k, v, score_mod=mod).shape == (B, H, 0, D)
    message = (
        "captured_0 = an array of shape [2, 4, 0, 33]: must have elements, as a function reads it. "
        "Leave the array out where it is empty."
    )
    refused(message, lambda: ks.attention(q, k, v, score_mod=mod))
    mask = lambda b, h, i, j: bias[b, h, i, j] > 0  # noqa: E731
    refused(message, lambda: ks.block_mask(mask, B, H, S, L))


def test_rows_that_see_nothing() -> None:
    q, k, v = inputs()
    out, lse = ks.attention(q, k, v, mask_mod=lambda b, h, i, j: i > 10, return_lse=True)
    assert (out[:, :, :11] == 0).all()
    assert np.isneginf(lse[:, :, :11]).all()
    assert np.isfinite(lse[:, :, 11:]).all()


def test_other_numbers_and_arrays_are_the_same_structure() -> None:
    q, k, v = inputs()
    with ks.trace():
        ks.attention(q, k, v, score_mod=decayed(drawn(H)), mask_mod=near(4))
    texts = set()
    for w in (4, 7):
        for n in (H, H + 3):
            texts.add(text_of(score_expression(decayed(drawn(n)), near(w)).structure))
    assert len(texts) == 1


def test_traces_carry_expressions(tmp_path: Path) -> None:
    q, k, v = inputs()
    mods = decayed(drawn(H)), near(-4)
    with ks.trace(tmp_path / "trace.json"):
        ks.attention(q, k, v, score_mod=mods[0], mask_mod=mods[1])
    (found,) = read_trace(tmp_path / "trace.json")
    structure = score_expression(*mods).structure
    assert structure_of(found.problem.spec.expression) == structure
    assert structure.key in str(found.problem)
    assert found.problem.captured_numbers == (-4,)
    assert found.problem.operands[-1].name == "captured_0"


@pytest.mark.parametrize("name", MODS)
def test_texts(name: str) -> None:
    structure = score_expression(*MODS[name](Extents(2, 2, 30, 40))).structure
    again = structure_of(text_of(structure))
    assert again == structure
    assert again.key == structure.key


@pytest.mark.parametrize(
    "text",
    [
        "",
        "garbage",
        "0 add INT32 1 1; score 0; visible 0",
        "0 coordinate FLOAT",
        "0 load FLOAT",
        '0 coordinate FLOAT "score"; score 0; visible 0; blocks 1',
    ],
)
def test_texts_of_nothing(text: str) -> None:
    with pytest.raises(InvalidValue, match="^expression = .*: is no text of an expression"):
        structure_of(text)


def test_descriptors_and_plans() -> None:
    q, k, v = inputs()
    out = np.empty_like(q)
    mods = decayed(drawn(H)), near(6)
    d = Attention.from_arrays(q, k, v, out, expression=score_expression(*mods))
    call = ks.plan(d, backend="numpy").bind()
    call()
    want = ks.attention(q, k, v, score_mod=mods[0], mask_mod=mods[1])
    np.testing.assert_array_equal(out, want)
    slopes = drawn(H, seed=5)
    ks.plan(d, backend="numpy").bind(captured_0=slopes)()
    want = ks.attention(q, k, v, score_mod=decayed(slopes), mask_mod=mods[1])
    np.testing.assert_array_equal(out, want)


def test_plans_keep_no_functions() -> None:
    q, k, v = inputs()
    d = Attention.from_arrays(q, k, v, np.empty_like(q), expression=score_expression(None, near(3)))
    bare = d.without_arrays().expression
    assert bare is not None
    assert bare.mask_mod is None
    planning.forget()


def test_refusals(refused: Refused) -> None:
    q, k, v = inputs()
    out, lse = np.empty_like(q), np.empty((B, H, S), np.float32)
    d = Attention.from_arrays(q, k, v, out, lse, expression=score_expression(None, near(3)))
    with pytest.raises(InvalidValue, match="the oracle calls a score_mod and a mask_mod"):
        ks.plan(d, backend="numpy").bind(check=True)
    grads = {f"d{n}": np.empty_like(x) for n, x in (("q", q), ("k", k), ("v", v))}
    with pytest.raises(InvalidValue, match="oracle calls a score_mod and a mask_mod themselves"):
        ks.plan(AttentionBwd(forward=d, dout=out, **grads), backend="numpy").bind(check=True)
    bias = drawn(S, L)
    biased = Attention.from_arrays(
        q, k, v, out, lse, bias=bias, expression=score_expression(None, near(3))
    )
    refused(
        "dbias = given: of an attention with a score_mod or a mask_mod there is none. Leave it "
        "out, or add the bias in the score_mod.",
        lambda: AttentionBwd(forward=biased, dout=out, dbias=np.empty_like(bias), **grads),
    )
    plain = Attention.from_arrays(q, k, v, out, lse)
    refused(
        "dscores = given: the attention has no score_mod. Leave it out.",
        lambda: AttentionBwd(forward=plain, dout=out, dscores=np.empty((B, H, S, L)), **grads),
    )
    with pytest.raises(InvalidValue, match="arrays of complex64 cannot be captured"):
        ks.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + Z[h])


Z = np.zeros(H, np.complex64)


def test_the_oracle_calls_the_function_itself() -> None:
    seen: list[Any] = []

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any, *, q_len: Any) -> Any:
        seen.append(q_len)
        return s * 2 + (i - j)

    scores = drawn(3, 4).astype(np.float64)
    got = called(mod, scores, 0, 1, np.arange(3)[:, None], np.arange(4), q_len=3, kv_len=4)
    np.testing.assert_array_equal(got, scores * 2 + np.subtract.outer(np.arange(3), np.arange(4)))
    assert seen == [3]


def test_the_oracle_refuses_what_kernels_move_inside_of_an_array() -> None:
    few = np.zeros(3)
    rule = "index 3 is out of bounds .*: kernels move such an index inside, and the oracle calls"
    with pytest.raises(InvalidValue, match=f"<lambda> = {rule}"):
        called(lambda b, h, i, j: few[j] > 0, 0, 0, np.arange(3)[:, None], np.arange(4))
