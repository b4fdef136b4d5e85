"""Scores and masks that users write, as expressions: FlexAttention's mods unchanged, random trees,
derivatives, bounds of blocks, keys and refusals."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernelseam.errors import InvalidValue
from kernelseam.expressions.bounds import bounds
from kernelseam.expressions.derivatives import array_gradients, slope
from kernelseam.expressions.elementwise import maximum, minimum, where
from kernelseam.expressions.evaluation import evaluate, place
from kernelseam.expressions.moved import moved
from kernelseam.expressions.scores import ScoreExpression, score_expression

torch = pytest.importorskip("torch", reason="torch is missing: the mods are torch's")
from torch_mods import MODS, B, H, grids  # noqa: E402

SHAPES = [(24, 24), (16, 40)]


def arrays_of(e: ScoreExpression) -> list[Any]:
    return [np.asarray(a.detach()) if isinstance(a, torch.Tensor) else a for a in e.arrays]


def coordinates(n: int, m: int, **more: Any) -> dict[str, Any]:
    extents = dict(zip(("b", "h", "q_idx", "kv_idx"), (B, H, n, m), strict=True))
    at: dict[str, Any] = {
        name: np.arange(e).reshape([-1 if i == j else 1 for j in range(4)])
        for i, (name, e) in enumerate(extents.items())
    }
    return {**at, "q_len": n, "kv_len": m, **more}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", MODS)
def test_mods_of_flex_attention(name: str, shape: tuple[int, int]) -> None:
    """A mod's score, mask and derivatives are those of the function itself on torch's tensors."""
    score_mod, mask_mod = MODS[name](*shape)
    e = score_expression(score_mod, mask_mod)
    s = torch.from_numpy(np.random.default_rng(1).standard_normal((B, H, *shape))).requires_grad_()
    at = coordinates(*shape, score=s.detach().numpy())
    arrays = arrays_of(e)
    score, visible = evaluate(e.structure[:2], at, e.numbers, arrays)
    if mask_mod is not None:
        np.testing.assert_array_equal(visible, mask_mod(*grids(*shape)) & torch.tensor(True))
    if score_mod is None:
        return
    want = score_mod(s, *grids(*shape)).expand(s.shape)
    loose = name in ("sandwich", "t5")  # torch computes a part of these in float32
    near = {"rtol": 1e-6 if loose else 1e-12, "atol": 1e-6 if loose else 1e-12}
    np.testing.assert_allclose(np.broadcast_to(score, s.shape), want.detach(), **near)
    arriving = torch.from_numpy(np.random.default_rng(2).standard_normal(s.shape))
    seen = torch.isfinite(want)
    torch.where(seen, want * arriving, 0).sum().backward()
    (by,) = evaluate([slope(e.structure.score)], at, e.numbers, arrays)
    got = np.where(seen, by * arriving.numpy(), 0)
    np.testing.assert_allclose(got, s.grad, **near)
    sums = {i: np.zeros(np.shape(a)) for i, a in enumerate(arrays)}
    for g in array_gradients(e.structure.score):
        factor, *indices = evaluate([g.factor, *g.indices], at, e.numbers, arrays)
        places = tuple(
            np.broadcast_to(place(i, n), s.shape)
            for i, n in zip(indices, sums[g.array].shape, strict=True)
        )
        terms = np.broadcast_to(arriving.numpy() * factor, s.shape)
        if places:
            np.add.at(sums[g.array], places, terms)
        else:
            sums[g.array] += terms.sum()
    for i, a in enumerate(e.arrays):
        if getattr(a, "requires_grad", False):
            np.testing.assert_allclose(sums[i], a.grad, rtol=1e-5, atol=1e-9 + 1e-5 * loose)


ORDERS = {
    "full_bias": ["each"],
    "shared_bias": ["axes"],
    "alibi": ["axes"],
    "scalars": ["axes", "axes"],
    "by_row": ["row"],
    "relative": ["diagonal"],
    "t5": ["diagonal"],
    "segments": ["scatter"],
    "graph": ["scatter"],
}


@pytest.mark.parametrize("name", ORDERS)
def test_orders_of_sums(name: str) -> None:
    e = score_expression(*MODS[name](24, 24))
    assert sorted(g.order for g in array_gradients(e.structure.score)) == ORDERS[name]


def blocks(e: ScoreExpression, n: int, m: int, rows: int, columns: int) -> tuple[Any, Any]:
    """Of every block [B, H, query blocks, key blocks]: whether it may have a visible pair, and
    whether all must be visible."""
    at = coordinates(n, m)
    for name, extent, size, shape in (("q", n, rows, (-1, 1)), ("kv", m, columns, (1, -1))):
        starts = np.arange(0, extent, size)
        at[f"{name}_first"] = starts.reshape(shape)
        at[f"{name}_last"] = (np.minimum(starts + size, extent) - 1).reshape(shape)
    low, high = evaluate(bounds(e.structure.visible), at, e.numbers, arrays_of(e))
    whole = (B, H, -(-n // rows), -(-m // columns))
    return np.broadcast_to(high, whole), np.broadcast_to(low, whole)


def check_blocks(e: ScoreExpression, n: int, rows: int, columns: int) -> tuple[int, int]:
    """Asserts that bounds are never wrong; empty blocks that there are, and those found."""
    at = coordinates(n, n)
    (seen,) = evaluate([e.structure.visible], at, e.numbers, arrays_of(e))
    tiles = np.broadcast_to(seen, (B, H, n, n)).reshape(
        B, H, n // rows, rows, n // columns, columns
    )
    some, all_ = tiles.any((3, 5)), tiles.all((3, 5))
    may, must = blocks(e, n, n, rows, columns)
    assert not (some & ~may).any()
    assert not (must & ~all_).any()
    return int((~some).sum()), int((~may).sum())


@pytest.mark.parametrize("name", [n for n in MODS if MODS[n](16, 16)[1]])
def test_blocks_of_mods(name: str) -> None:
    e = score_expression(*MODS[name](128, 128))
    empty, found = check_blocks(e, 128, 16, 16)
    exact = {"packed_documents": 0.6, "tree": 0.6}
    assert found >= exact.get(name, 1.0) * empty


WORDS: dict[str, Any] = {
    "np.clip by its keywords": lambda s, i, j: np.clip(s, a_min=-0.5, a_max=0.25),
    "one end": lambda s, i, j: np.clip(s, None, 0.25),
    "logical_and of numbers": lambda s, i, j: s * np.logical_and(i, j * 2),
    "logical_or of numbers": lambda s, i, j: s * np.logical_or(i, j),
    "logical_xor of numbers": lambda s, i, j: s * np.logical_xor(i, j),
    "logical_and of floats": lambda s, i, j: np.logical_and(s, i > 2),
    "a sum of bools": lambda s, i, j: s * ((i > j) + (j > 2)),
    "a product of bools": lambda s, i, j: s * ~((i > j) * (j > 2)),
    "divided down by 1": lambda s, i, j: s // 1.0,
    "a number beyond int64": lambda s, i, j: s * (i < 2**63),
    "a dtype by its letters": lambda s, i, j: (3 * s).astype("i4") + (3 * s).astype(np.longlong),
    "uint8": lambda s, i, j: ((i - j) * 37).astype(np.uint8),
    "int8": lambda s, i, j: ((i - j) * 37).astype(np.int8),
    "int16": lambda s, i, j: ((i - j) * 9000).astype(np.int16),
}


@pytest.mark.parametrize("name", WORDS)
def test_functions_do_what_numpys_do(name: str) -> None:
    at = coordinates(9, 12, score=np.random.default_rng(3).standard_normal((B, H, 9, 12)))
    e = score_expression(lambda s, b, h, i, j: WORDS[name](s, i, j))
    (found,) = evaluate([e.structure.score], at, e.numbers, ())
    wanted = WORDS[name](at["score"], at["q_idx"], at["kv_idx"])
    np.testing.assert_array_equal(found, np.broadcast_to(wanted, np.shape(found)))


def test_a_float_beyond_int64_is_the_largest() -> None:
    e = score_expression(lambda s, b, h, i, j: s.astype(np.int64) // 2**40)
    at = coordinates(1, 3, score=np.array([np.inf, -np.inf, np.nan]))
    (found,) = evaluate([e.structure.score], at, e.numbers, ())
    np.testing.assert_array_equal(np.unique(found), [-(2**23), 0, 2**23 - 1])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda s, i: s & 1, "& | ^ ~ << >> are of integers and bools, and this is a float"),
        (lambda s, i: ~s, "Convert it, or write 1 << n for 2 ** n"),
        (lambda s, i: i >> s, "& | ^ ~ << >> are of integers and bools"),
        (lambda s, i: s.astype("e"), "the function rounds to float16"),
        (lambda s, i: s.to("cpu", torch.bfloat16), "the function rounds to bfloat16"),
        (lambda s, i: s.to(torch.float8_e5m2), "the function rounds to float8_e5m2"),
        (lambda s, i: s.astype(np.uint16), "uint16 is no type that an expression has"),
        (lambda s, i: s.astype("of none"), "'of none' is no dtype. Give one of bool, uint8"),
        (lambda s, i: np.add.reduce(s), "add.reduce is of whole arrays"),
    ],
)
def test_what_has_no_form(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=re.escape(message)):
        score_expression(lambda s, b, h, i, j: function(s, i))


def test_a_name_that_begins_with_r_is_no_reflected_operator() -> None:
    with pytest.raises(InvalidValue, match="rint is not a function of one element"):
        score_expression(lambda s, b, h, i, j: np.rint(s))


# ---- random trees: the same function of values that are traced, of NumPy's arrays and of torch's


def _number(draw: Callable[..., Any], depth: int, array: Any, plane: Any) -> Callable[..., Any]:
    """A random integer expression of (h, q, kv)."""
    c = draw(st.integers(1, 20))
    if depth == 0:
        return draw(
            st.sampled_from(
                [
                    lambda h, q, kv: q,
                    lambda h, q, kv: kv,
                    lambda h, q, kv: q - kv,
                    lambda h, q, kv: kv * c,
                    lambda h, q, kv: h * c + q,
                    lambda h, q, kv: array[q],
                    lambda h, q, kv: plane[h, kv],
                    lambda h, q, kv: array[(q - kv) % 32],
                ]
            )
        )
    x = _number(draw, depth - 1, array, plane)
    y = _number(draw, depth - 1, array, plane)
    return draw(
        st.sampled_from(
            [
                lambda *i: x(*i) + y(*i),
                lambda *i: x(*i) - y(*i),
                lambda *i: x(*i) * c,
                lambda *i: x(*i) // c,
                lambda *i: x(*i) % c,
                lambda *i: x(*i) % -c,
                lambda *i: -x(*i),
                lambda *i: abs(x(*i)),
                lambda *i: x(*i) * x(*i),
                lambda *i: minimum(x(*i), y(*i)),
                lambda *i: maximum(x(*i), y(*i)),
                lambda *i: where(x(*i) < y(*i), x(*i), y(*i) + c),
                lambda *i: (x(*i) >> 2) & 7,
            ]
        )
    )


@st.composite
def masks(draw: Callable[..., Any]) -> Callable[..., Any]:
    seed = draw(st.integers(0, 9))
    random = np.random.default_rng(seed)
    array, plane = np.sort(random.integers(0, 6, 32)), random.integers(-9, 60, (H, 32))
    depth = st.integers(0, 2)

    def condition() -> Callable[..., Any]:
        x = _number(draw, draw(depth), array, plane)
        y = _number(draw, draw(depth), array, plane)
        return draw(
            st.sampled_from(
                [
                    lambda *i: x(*i) < y(*i),
                    lambda *i: x(*i) <= y(*i),
                    lambda *i: x(*i) == y(*i),
                    lambda *i: x(*i) != y(*i),
                    lambda *i: ~(x(*i) > y(*i)),
                ]
            )
        )

    first, second = condition(), condition()
    if draw(st.booleans()):
        return lambda b, h, q, kv: first(h, q, kv) & second(h, q, kv)
    return lambda b, h, q, kv: first(h, q, kv) | second(h, q, kv)


@settings(max_examples=150, derandomize=True)
@given(mask=masks())
def test_random_masks(mask: Callable[..., Any]) -> None:
    e = score_expression(None, mask)
    at = coordinates(32, 32)
    (seen,) = evaluate([e.structure.visible], at, e.numbers, arrays_of(e))
    indices = [at[c] for c in ("b", "h", "q_idx", "kv_idx")]
    np.testing.assert_array_equal(seen, mask(*indices))
    check_blocks(e, 32, 8, 4)


SMOOTH: list[Callable[..., Any]] = [
    lambda x, y, c: x + y,
    lambda x, y, c: x * y,
    lambda x, y, c: x - c,
    lambda x, y, c: x / (c + y * y),
    lambda x, y, c: torch.tanh(x) * y,
    lambda x, y, c: c * torch.tanh(x / c),
    lambda x, y, c: torch.exp(-x * x),
    lambda x, y, c: torch.log(1 + x * x),
    lambda x, y, c: torch.sqrt(c + x * x),
    lambda x, y, c: torch.sigmoid(x) + y,
    lambda x, y, c: torch.sin(x) * torch.cos(y),
    lambda x, y, c: torch.where(x < y, x, y * c),
    lambda x, y, c: torch.maximum(x, y * c),
    lambda x, y, c: torch.abs(x) + y,
    lambda x, y, c: torch.nn.functional.gelu(x),
    lambda x, y, c: torch.erf(x) - y,
    lambda x, y, c: torch.special.ndtr(c * x) * y,
    lambda x, y, c: x.clamp(-c, c),
    lambda x, y, c: torch.nn.functional.silu(y),
    lambda x, y, c: torch.tan(0.25 * torch.sin(y)),
]


@settings(max_examples=100, derandomize=True)
@given(
    steps=st.lists(st.tuples(st.sampled_from(SMOOTH), st.floats(0.5, 3)), min_size=1, max_size=5)
)
def test_random_scores(steps: list[tuple[Callable[..., Any], float]]) -> None:
    """Values and the derivative are torch's."""
    plane = torch.from_numpy(np.random.default_rng(5).standard_normal((8, 8)))

    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        x, y = s, plane[q, kv]
        for step, c in steps:
            x, y = step(x, y, c), x
        return x

    e = score_expression(score)
    s = torch.from_numpy(np.random.default_rng(6).standard_normal((B, H, 8, 8))).requires_grad_()
    want = score(s, *grids(8, 8)).expand(s.shape)
    (want + 0 * s).sum().backward()
    at = coordinates(8, 8, score=s.detach().numpy())
    got, by = evaluate([e.structure.score, slope(e.structure.score)], at, e.numbers, arrays_of(e))
    np.testing.assert_allclose(np.broadcast_to(got, s.shape), want.detach(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(np.broadcast_to(by, s.shape), s.grad, rtol=1e-9, atol=1e-12)


# ---- bounds


def test_nan_makes_no_block_certain() -> None:
    x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    x[::10] = math.nan
    for mask in (
        lambda b, h, q, kv: (x[kv] > 0) | ~(x[q] < 9),
        lambda b, h, q, kv: x[kv].astype(bool) & (x[kv].astype(int) <= 0),
        lambda b, h, q, kv: np.log(x[kv]) <= 5,
        lambda b, h, q, kv: x[q] / 0.0 <= x[kv] / 0.0,
    ):
        check_blocks(score_expression(None, mask), 64, 16, 16)


def test_sums_of_unknown_numbers_do_not_overflow() -> None:
    """A plane's elements are not known; 2³¹ of them and a constant stay in order."""
    plane = np.zeros((8, 8), np.int32)
    e = score_expression(None, lambda b, h, q, kv: plane[q, kv] + 2_000_000_000 > q)
    may, must = blocks(e, 8, 8, 4, 4)
    assert may.all()
    assert not must.any()


def test_another_place_of_a_part_is_the_same_structure() -> None:
    array = np.arange(40.0)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, *, kv_len: Any) -> Any:
        return score + array[q_idx] * h - kv_len

    whole = score_expression(score_mod, lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
    parts = [
        moved(whole, {"q_idx": q, "kv_idx": 7, "b": 3}, {"kv_len": 40, "q_len": 9}) for q in (0, 5)
    ]
    assert parts[0].structure == parts[1].structure
    assert [p.numbers for p in parts] == [(0, 7, 40), (5, 7, 40)]  # nothing reads b or q_len
    own = {"score": 1.0, "b": 0, "h": 2, "q_idx": 4, "kv_idx": 3, "q_len": 1, "kv_len": 1}
    for part, q in zip(parts, (4, 9), strict=True):
        s = part.structure
        score, seen = evaluate([s.score, s.visible], own, part.numbers, part.arrays, np.float64)
        assert (score, seen) == (1.0 + 2 * q - 40, q >= 10)
