"""Block masks: which blocks a mask leaves, and attention by them; torch's lists."""

from __future__ import annotations

import math
import re
import runpy
from pathlib import Path
from typing import Any

import kernelseam as ks
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernelseam.expressions.block_bits import packed, unpacked
from kernelseam.expressions.evaluation import evaluate
from kernelseam.expressions.scores import score_expression
from kernelseam.expressions.text import structure_of, text_of

B, H, G, S, L, D = 2, 4, 2, 70, 90, 16
WIDTHS = np.array([5, 90, 30, 7], np.int32)


def drawn(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def inputs() -> tuple[Any, Any, Any]:
    return drawn(B, H, S, D), drawn(B, G, L, D, seed=1), drawn(B, G, L, D, seed=2)


def near(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (abs(i - j) < WIDTHS[h]) & (j >= 20 * b)


def whole(mask: Any, batch: int, heads: int, q_len: int, kv_len: int) -> Any:
    """[batch, heads, q_len, kv_len]"""
    b, h, i, j = np.ogrid[:batch, :heads, :q_len, :kv_len]
    return np.broadcast_to(mask(b, h, i, j), (batch, heads, q_len, kv_len))


def states_of(seen: Any, q_size: int, kv_size: int) -> Any:
    """0, 1 or 2 of each block of a mask that is there whole."""
    rows, columns = range(0, seen.shape[2], q_size), range(0, seen.shape[3], kv_size)
    blocks = [[seen[..., r : r + q_size, c : c + kv_size] for c in columns] for r in rows]
    some = np.array([[x.any((2, 3)) for x in row] for row in blocks])
    every = np.array([[x.all((2, 3)) for x in row] for row in blocks])
    return np.moveaxis(some.astype(int) + every, (0, 1), (2, 3))


@pytest.mark.parametrize("sizes", [(16, 16), (1, 40), (128, 7), (33, 128)])
def test_states(sizes: tuple[int, int]) -> None:
    made = ks.block_mask(near, B, H, S, L, block_size=sizes)
    np.testing.assert_array_equal(made.states(), states_of(whole(near, B, H, S, L), *sizes))


@st.composite
def bands(draw: st.DrawFn) -> Any:
    """A mask of few blocks, whatever their sizes, and what it is over."""
    low, width = draw(st.integers(-40, 40)), draw(st.integers(0, 60))
    step, kinds = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    kind = np.random.default_rng(draw(st.integers(0, 9))).integers(0, kinds, 80).astype(np.int32)

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        d = j - i - low
        return (d >= 0) & (d <= width * (h + 1)) & (d % step == 0) | (kind[i] == kind[j] + b + 1)

    return mask, draw(st.integers(1, 80)), draw(st.integers(1, 80))


@settings(max_examples=60)
@given(bands(), st.integers(1, 40), st.integers(1, 40), st.integers(1, 50), st.integers(1, 50))
def test_blocks_are_never_wrongly_empty_or_whole(
    drawn: Any, q_size: int, kv_size: int, rows: int, columns: int
) -> None:
    """Whatever the sizes of the lists' blocks and of the tiles that ask for them."""
    mask, q_len, kv_len = drawn
    made = ks.block_mask(mask, 2, 2, q_len, kv_len, block_size=(q_size, kv_size))
    seen = whole(mask, 2, 2, q_len, kv_len)
    np.testing.assert_array_equal(made.states(), states_of(seen, q_size, kv_size))
    e = score_expression(block_mask=made)
    tiles = states_of(seen, rows, columns)
    at: dict[str, Any] = {"b": np.arange(2)[:, None, None, None], "h": np.arange(2)[:, None, None]}
    for name, n, size, shape in (
        ("q", q_len, rows, (-1, 1)),
        ("kv", kv_len, columns, (-1,)),
    ):
        first = np.arange(0, n, size)
        at[f"{name}_first"] = first.reshape(shape)
        at[f"{name}_last"] = (np.minimum(first + size, n) - 1).reshape(shape)
    every, some = evaluate(e.structure.seen[1], at, e.numbers, e.arrays)
    assert (some | (tiles == 0)).all()
    assert (~every | (tiles == 2)).all()
    if (q_size, kv_size) == (rows, columns):
        np.testing.assert_array_equal(every, tiles == 2)


@given(st.integers(1, 70), st.integers(0, 9))
def test_words(columns: int, seed: int) -> None:
    states = np.random.default_rng(seed).integers(0, 2, (3, columns, 2)).astype(bool)
    np.testing.assert_array_equal(unpacked(packed(states), columns), states)


def test_attention_and_gradients() -> None:
    q, k, v = inputs()
    blocks = ks.block_mask(near, B, H, S, L, block_size=(16, 32))
    for options in ({}, {"score_mod": lambda s, b, h, i, j: s - 0.1 * abs(i - j)}):
        out, lse = ks.attention(q, k, v, block_mask=blocks, return_lse=True, **options)
        want = ks.attention(q, k, v, mask_mod=near, **options)
        np.testing.assert_allclose(out, want, rtol=1e-6, atol=1e-6)
        dout = drawn(*out.shape, seed=5)
        got, expected = (
            ks.attention_bwd(dout, q, k, v, out, lse, **options, **masked)
            for masked in ({"block_mask": blocks}, {"mask_mod": near})
        )
        for x, y in zip(got[:3], expected[:3], strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_gradients_by_scores_of_empty_blocks_are_zeros() -> None:
    q, k, v = inputs()
    blocks = ks.block_mask(near, B, H, S, L, block_size=8)
    mod = {"score_mod": lambda s, b, h, i, j: s * 0.5, "block_mask": blocks}
    out, lse = ks.attention(q, k, v, return_lse=True, **mod)
    made = ks.attention_bwd(out, q, k, v, out, lse, score_gradient=True, **mod).dscores
    assert (made[~whole(near, B, H, S, L)] == 0).all()
    assert (made != 0).any()


def test_a_mask_of_few_heads_and_entries_repeats() -> None:
    q, k, v = inputs()
    blocks = ks.block_mask(lambda b, h, i, j: i >= j, None, None, S, L)
    assert blocks.words.shape[:2] == (1, 1)
    want = ks.attention(q, k, v, mask_mod=lambda b, h, i, j: i >= j)
    np.testing.assert_allclose(ks.attention(q, k, v, block_mask=blocks), want, rtol=1e-6, atol=1e-6)
    with pytest.raises(ks.errors.InvalidValue, match="heads = None: the mask_mod reads h"):
        ks.block_mask(near, B, None, S, L)


def test_shorter_entries() -> None:
    q, k, v = inputs()
    lengths = np.array([90, 31], np.int32)
    blocks = ks.block_mask(near, B, H, S + 30, L + 9, block_size=16)
    got = ks.attention(q, k, v, kv_lengths=lengths, block_mask=blocks)
    want = ks.attention(q, k, v, kv_lengths=lengths, mask_mod=near)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_structures_differ_by_block_sizes_alone() -> None:
    def structure(size: int, n: int) -> Any:
        blocks = ks.block_mask(near, B, H, n, n, block_size=size)
        return score_expression(block_mask=blocks).structure

    assert structure(16, S) == structure(16, L)
    assert structure(16, S).key != structure(32, S).key
    assert structure_of(text_of(structure(16, S))) == structure(16, S)


def test_str() -> None:
    blocks = ks.block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, block_size=32)
    assert str(blocks) == "blocks of 32×32: 38% empty, 25% mixed, 38% whole"


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0), (0, 0)])
def test_of_no_queries_or_keys_there_are_no_blocks(q_len: int, kv_len: int) -> None:
    """As attention has none then; arrays that are looked up are no longer than the extents."""
    order = np.arange(5)
    blocks = ks.block_mask(lambda b, h, i, j: order[i] >= order[j], None, None, q_len, kv_len)
    q, k = np.ones((1, 2, q_len, 8), np.float32), np.ones((1, 2, kv_len, 8), np.float32)
    out, lse = ks.attention(q, k, k, block_mask=blocks, return_lse=True)
    assert out.shape == q.shape and not out.any() and np.all(lse == -math.inf)
    assert not blocks.words.any()


def asks(b: Any, h: Any, i: Any, j: Any, *, kv_len: Any) -> Any:
    return j < kv_len - 3


def test_refusals() -> None:
    q, k, v = inputs()
    blocks = ks.block_mask(near, B, H, S, L)
    lengths = np.array([90, 31], np.int32)
    cases: tuple[tuple[str, Any], ...] = (
        (
            "mask_mod = given: is that of block_mask where there is one",
            lambda: ks.attention(q, k, v, block_mask=blocks, mask_mod=near),
        ),
        (
            "block_mask = int: must be a block mask",
            lambda: ks.attention(q, k, v, block_mask=3),
        ),
        (
            "block_mask = of heads = 4: must be of heads = 2, as q is, or 1",
            lambda: ks.attention(q[:, :2], k, v, block_mask=blocks),
        ),
        (
            "block_mask = for keys up to 60: must be for S_k = 90",
            lambda: ks.attention(q, k, v, block_mask=ks.block_mask(near, B, H, S, 60)),
        ),
        (
            "block_mask = for keys up to 91: must be for S_k = 90 exactly",
            lambda: ks.attention(q, k, v, block_mask=ks.block_mask(asks, B, H, S, 91)),
        ),
        (
            "block_mask = its mask_mod reads q_len or kv_len",
            lambda: ks.attention(
                q, k, v, kv_lengths=lengths, block_mask=ks.block_mask(asks, B, H, S, L)
            ),
        ),
        ("block_size", lambda: ks.block_mask(near, B, H, S, L, block_size=(1, 2, 3))),
        ("block_size[1] = 0", lambda: ks.block_mask(near, B, H, S, L, block_size=(1, 0))),
        ("q_len = -1", lambda: ks.block_mask(near, B, H, -1, L)),
    )
    for message, call in cases:
        with pytest.raises(ks.errors.InvalidValue, match=f"^{re.escape(message)}"):
            call()


def test_the_picture_is_what_the_script_draws() -> None:
    script = Path(__file__).parents[2] / "tools" / "block_pictures.py"
    made = runpy.run_path(str(script))
    assert made["PICTURE"].read_text(encoding="utf-8") == made["drawn"]()
    assert len(made["SHOWN"]) == 15
