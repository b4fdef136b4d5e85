"""The projections' oracle against sums written out, its cases' data, and faults that their bounds
must catch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kernelseam.oracle import check
from kernelseam.oracle.projections import (
    output_projection,
    output_projection_bwd,
    qkv_projection,
    qkv_projection_bwd,
)
from kernelseam.parity.matrix import matrix, named
from kernelseam.parity.running.stages import verdict
from kernelseam.samples.data import projection as projection_data
from kernelseam.samples.data import projection_places
from kernelseam.samples.data.attention import INVALID_PAGES
from kernelseam.samples.operations.operands import layout, outputs, values
from kernelseam.samples.projection_case import ProjectionCase

Array = np.ndarray[Any, Any]
Values = dict[str, Array]
RNG = np.random.default_rng(5)
OPERATIONS = ("qkv_projection", "output_projection", "qkv_projection_bwd", "output_projection_bwd")


def case(name: str) -> ProjectionCase:
    found = named(name)
    assert isinstance(found, ProjectionCase)
    return found


def results(c: ProjectionCase, x: Values) -> Values:
    """What an exact implementation would leave: the oracle's, rounded."""
    placements = layout(c).placements
    if c.appended:
        rows, _ = projection_places.expected(c, x)
        return {n: rows[n].value.astype(placements[n].dtype.numpy) for n in outputs(c)}
    wanted = projection_data.expected(c, x)
    return {n: wanted[n][0].out.astype(placements[n].dtype.numpy) for n in outputs(c)}


# ---------------------------------------------------------------- the oracle


@pytest.mark.parametrize("style", ["", "halves", "pairs"])
def test_q_k_and_v_element_by_element(style: str) -> None:
    x, w, bias = (
        RNG.standard_normal((2, 3, 5)),
        RNG.standard_normal((16, 5)),
        RNG.standard_normal(16),
    )
    angle = RNG.standard_normal((7, 1))
    cos, sin = np.cos(angle).astype("f4"), np.sin(angle).astype("f4")
    positions = np.array([[6, 0, 2], [1, 1, 5]])
    found = qkv_projection(
        x, w, bias, 2, 1, 4, *((cos, sin) if style else (None, None)), style, positions
    )
    for (name, heads), first in zip((("q", 2), ("k", 1), ("v", 1)), (0, 8, 12), strict=True):
        result, count = found[name]
        assert count == 5 and result.out.shape == result.magnitude.shape == (2, heads, 3, 4)
        for b, h, s in np.ndindex(2, heads, 3):
            rows = range(first + 4 * h, first + 4 * h + 4)
            y = [sum(x[b, s, k] * w[n, k] for k in range(5)) + bias[n] for n in rows]
            size = [sum(abs(x[b, s, k] * w[n, k]) for k in range(5)) + abs(bias[n]) for n in rows]
            if style and name != "v":
                c, t = float(cos[positions[b, s], 0]), float(sin[positions[b, s], 0])
                i, j = 0, 1  # the only pair of either style: n = 2
                y[i], y[j] = y[i] * c - y[j] * t, y[j] * c + y[i] * t
                size[i], size[j] = (
                    size[i] * abs(c) + size[j] * abs(t),
                    size[j] * abs(c) + size[i] * abs(t),
                )
            np.testing.assert_allclose(result.out[b, h, s], y, rtol=1e-12)
            np.testing.assert_allclose(result.magnitude[b, h, s], size, rtol=1e-12)


def test_halves_and_pairs_differ_from_the_second_on() -> None:
    x, w = np.ones((1, 1, 1)), np.arange(12.0)[:, None]
    cos, sin = np.zeros((1, 2), "f4"), np.array([[1, 2]], "f4")
    at = np.zeros((1, 1), int)
    found = {s: qkv_projection(x, w, None, 1, 1, 4, cos, sin, s, at) for s in ("halves", "pairs")}
    halves, pairs = (f["q"][0].out[0, 0, 0] for f in found.values())
    assert halves.tolist() == [-2, -6, 0, 2] and pairs.tolist() == [-1, 0, -6, 4]


def test_the_output_and_the_gradients_element_by_element() -> None:
    a, w = RNG.standard_normal((2, 3, 4, 2)), RNG.standard_normal((5, 6))
    bias, residual = RNG.standard_normal(5), RNG.standard_normal((2, 1, 4, 5))
    out = output_projection(a, w, bias, residual)["out"][0].out
    d = RNG.standard_normal((2, 1, 4, 5))
    back = {n: r.out for n, (r, _) in output_projection_bwd(d, a, w[None, None], 3).items()}
    for b, s, j in np.ndindex(2, 4, 5):
        want = sum(a[b, h, s, e] * w[j, 2 * h + e] for h in range(3) for e in range(2))
        assert out[b, 0, s, j] == pytest.approx(want + bias[j] + residual[b, 0, s, j], rel=1e-12)
    for b, h, s, e in np.ndindex(2, 3, 4, 2):
        want = sum(d[b, 0, s, j] * w[j, 2 * h + e] for j in range(5))
        assert back["d_attn_out"][b, h, s, e] == pytest.approx(want, rel=1e-12)
    for j, h, e in np.ndindex(5, 3, 2):
        want = sum(d[b, 0, s, j] * a[b, h, s, e] for b in range(2) for s in range(4))
        assert back["d_weight"][0, 0, j, 2 * h + e] == pytest.approx(want, rel=1e-12)
    np.testing.assert_allclose(back["d_bias"], d.sum((0, 1, 2)), rtol=1e-12)
    dq, dk, dv = (RNG.standard_normal((2, n, 4, 2)) for n in (2, 1, 1))
    x, weight = RNG.standard_normal((2, 1, 4, 5)), RNG.standard_normal((1, 1, 8, 5))
    found = {n: r.out for n, (r, _) in qkv_projection_bwd(dq, dk, dv, x, weight).items()}
    columns = [dq[:, 0], dq[:, 1], dk[:, 0], dv[:, 0]]
    for b, s, k in np.ndindex(2, 4, 5):
        want = sum(
            columns[h][b, s, e] * weight[0, 0, 2 * h + e, k] for h in range(4) for e in range(2)
        )
        assert found["d_input"][b, 0, s, k] == pytest.approx(want, rel=1e-12)
    for h, e, k in np.ndindex(4, 2, 5):
        want = sum(columns[h][b, s, e] * x[b, 0, s, k] for b in range(2) for s in range(4))
        assert found["d_weight"][0, 0, 2 * h + e, k] == pytest.approx(want, rel=1e-12)
        assert found["d_bias"][2 * h + e] == pytest.approx(columns[h][..., e].sum(), rel=1e-12)


# ---------------------------------------------------------------- cases


def test_operations_dtypes_and_options_are_covered() -> None:
    cases = [c for c in matrix("projection") if isinstance(c, ProjectionCase)]
    assert {c.operation for c in cases} == set(OPERATIONS) and len(cases) > 150
    for operation in OPERATIONS:
        mine = [c for c in cases if c.operation == operation]
        assert {str(c.dtype) for c in mine} == {"float16", "bfloat16", "float32", "float64"}
        assert {c.head_dim for c in mine} >= {32, 64, 80, 128} and {c.batch for c in mine} >= {
            0,
            1,
            2,
        }
        assert (
            any(c.injected for c in mine)
            and any(c.exact for c in mine)
            and any(c.bias is None for c in mine)
        )
    assert {c.rotary for c in cases} == {"", "halves", "pairs"} and {
        c.page_size for c in cases
    } == {0, 1, 4, 16, 24}
    appended = [c for c in cases if c.appended]
    assert {c.scaled for c in appended} == {"", "heads", "tokens"}
    assert {(bool(c.sequences), c.cached) for c in appended if c.rotary} >= {(True, True)}
    assert any(c.slots for c in appended) and any(c.positions for c in appended)
    assert any(c.num_heads % c.kv_heads for c in cases), (
        "heads of k and v need not divide those of q"
    )


def test_pages_are_shuffled_and_tables_name_only_what_is_used() -> None:
    c = case("qkv-projection-f16-pages-16-rotary")
    own = projection_places.places(c)
    table, positions = own.block_table, own.positions
    used = np.zeros(table.shape, bool)
    for b, row in enumerate(positions):
        used[b, row // c.page_size] = True
    assert set(table[~used].tolist()) <= set(INVALID_PAGES) and (~used).any()
    pages = table[used].tolist()
    assert len(set(pages)) == len(pages) < own.pages and pages != sorted(pages)
    placement = layout(c).placements["k"]
    assert placement.row_spans is not None and len(placement.row_spans) == c.batch * c.S
    assert (
        all(len(set(row)) == c.S for row in positions.tolist()) and (np.diff(positions) < 0).any()
    )


def test_a_residual_in_place_shares_the_result_s_memory() -> None:
    placements = layout(case("output-projection-f16-in-place")).placements
    assert placements["residual"] == placements["out"]


# ---------------------------------------------------------------- faults


RIGHT = [c.name for c in matrix("projection") if c.name.endswith(("f16", "bias", "rotary", "f32"))]


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes(name: str) -> None:
    c = case(name)
    found = verdict(c, results(c, values(c)))
    assert found.passed and found.worst <= 0.5, found.message


def but(**change: Callable[[Array], Array]) -> Callable[[ProjectionCase, Values], Values]:
    """The results of other operands."""
    return lambda c, x: results(c, {**x, **{n: f(x[n]) for n, f in change.items()}})


def of(**fields: Any) -> Callable[[ProjectionCase, Values], Values]:
    """The results of another case with the same operands."""
    return lambda c, x: results(replace(c, **fields), x)


def written(**change: Callable[[Values], Array]) -> Callable[[ProjectionCase, Values], Values]:
    """Right results, some of them changed."""

    def made(c: ProjectionCase, x: Values) -> Values:
        right = results(c, x)
        return {**right, **{n: f(right) for n, f in change.items()}}

    return made


def without(axis: int, at: int) -> Callable[[Array], Array]:
    """One entry of an axis is taken for 0."""

    def zeroed(x: Array) -> Array:
        y = x.copy()
        np.moveaxis(y, axis, 0)[at] = 0
        return y

    return zeroed


def v_for_k(x: Array, axis: int) -> Array:
    """Rows of the weight, or elements of the bias, where those that make v stand in the place of
    those that make k."""
    q, _, v = np.split(x, [128, 192], axis)
    return np.concatenate([q, v, v], axis)


QKV, OUT, QKV_BWD, OUT_BWD = (n.replace("_", "-") for n in OPERATIONS)
FAULTS: dict[str, tuple[str, Callable[[ProjectionCase, Values], Values]]] = {
    "the last column of the input is not read": (f"{QKV}-f16", but(input=without(3, -1))),
    "no bias": (f"{QKV}-f16-bias", but(bias=np.zeros_like)),
    "k and v in each other's place": (
        f"{QKV}-f16",
        written(k=lambda r: r["v"], v=lambda r: r["k"]),
    ),
    "rounded towards zero": (
        f"{QKV}-f16-integers",
        written(q=lambda r: np.nextafter(r["q"], np.float16(0)).astype(np.float16)),
    ),
    "pairs for halves": (f"{QKV}-f16-rotary-halves", of(rotary="pairs")),
    "one position late": (
        f"{QKV}-f16-rotary-halves",
        but(cos=lambda t: np.roll(t, 1, axis=0), sin=lambda t: np.roll(t, 1, axis=0)),
    ),
    "positions that are numbered": (f"{QKV}-f16-rotary-halves-positions", of(positions=False)),
    "v is rotated, too": (
        f"{QKV}-f16-rotary-halves",
        lambda c, x: {
            **results(c, x),
            "v": results(
                c, {**x, "weight": v_for_k(x["weight"], 2), "bias": v_for_k(x["bias"], 0)}
            )["k"],
        },
    ),
    "a page's rows one off": (
        f"{QKV}-f16-pages-16",
        written(k=lambda r: np.roll(r["k"], 1, axis=2)),
    ),
    "a head is not summed": (f"{OUT}-f16", but(attn_out=without(1, 3))),
    "no residual": (f"{OUT}-f16-bias-residual", but(residual=np.zeros_like)),
    "heads of dv are not summed": (
        f"{QKV_BWD}-f16-bias",
        lambda c, x: {
            **results(c, x),
            "d_input": results(c, {**x, "dv": np.zeros_like(x["dv"])})["d_input"],
        },
    ),
    "the last token is not summed": (
        f"{QKV_BWD}-f16-bias",
        lambda c, x: {
            **results(c, x),
            "d_weight": results(c, {**x, "input": without(2, 32)(x["input"])})["d_weight"],
        },
    ),
    "d_bias without the last token": (
        f"{QKV_BWD}-f16-bias",
        lambda c, x: {
            **results(c, x),
            "d_bias": results(c, {**x, "dq": without(2, 32)(x["dq"])})["d_bias"],
        },
    ),
    "heads of d_attn_out in another order": (
        f"{OUT_BWD}-f16-bias",
        written(d_attn_out=lambda r: r["d_attn_out"][:, ::-1]),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught(fault: str) -> None:
    name, wrong = FAULTS[fault]
    c = case(name)
    x = values(c)
    found = verdict(c, wrong(c, x))
    assert not found.passed, f"{name} does not see it: {found.message}"


def test_one_element_that_is_off_is_named() -> None:
    c = case("qkv-projection-f16")
    found = results(c, values(c))
    found["k"][1, 0, 32, 31] += np.float16(0.1)
    message = verdict(c, found).message
    assert message.startswith("k[1, 0, 32, 31] is ") and "the oracle says" in message
    wanted = projection_data.expected(c, values(c))
    assert not check.projection(wanted, c.dtype, {"k": found["k"]})
    assert check.projection(wanted, c.dtype, {"q": found["q"]})
