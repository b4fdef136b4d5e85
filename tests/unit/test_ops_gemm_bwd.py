"""bmm_bwd and matmul2d_bwd: gradients against plain sums, one launch each, and what broadcast
inputs get."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernelseam import bmm, bmm_bwd, matmul2d, matmul2d_bwd, trace
from kernelseam.errors import InvalidValue
from refusals import Refused

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(30)


def integers(*shape: int, dtype: Any = np.float32) -> Array:
    return RNG.integers(-3, 4, shape).astype(dtype)


def op(x: Array, transposed: bool) -> Array:
    return x.swapaxes(-1, -2) if transposed else x


def wanted(
    dc: Array, a: Array, b: Array, ta: bool, tb: bool, alpha: float = 1
) -> tuple[Array, Array]:
    """The gradients of a and b as the formulas say, in float64, summed over axes that repeat."""
    op_a, op_b = op(a, ta).astype(np.float64), op(b, tb).astype(np.float64)
    group = a.shape[1] // b.shape[1] if a.ndim == 4 else 1
    each = np.repeat(op_b, group, axis=1) if group > 1 else op_b
    da, db = alpha * (dc @ each.swapaxes(-1, -2)), alpha * (op_a.swapaxes(-1, -2) @ dc)
    if group > 1:
        db = db.reshape(*b.shape[:2], group, *db.shape[-2:]).sum(2)
    da, db = op(da, ta), op(db, tb)
    for axis in range(a.ndim):
        da = da.sum(axis, keepdims=True) if a.strides[axis] == 0 else da
        db = db.sum(axis, keepdims=True) if b.strides[axis] == 0 else db
    return da, db


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_dtypes(dtype: Any) -> None:
    dc, a, b = (integers(*s, dtype=dtype) for s in ((5, 4), (5, 7), (7, 4)))
    da, db = matmul2d_bwd(dc, a, b)
    assert da.dtype == db.dtype == dtype
    np.testing.assert_array_equal(da.astype("f8"), dc.astype("f8") @ b.astype("f8").T)
    np.testing.assert_array_equal(db.astype("f8"), a.astype("f8").T @ dc.astype("f8"))
    da, db = matmul2d_bwd(dc, a, b, out_dtype="float32" if dtype != np.float64 else "float64")
    assert da.dtype == (np.float32 if dtype != np.float64 else np.float64)


def test_only_what_is_wanted() -> None:
    dc, a, b = integers(5, 4), integers(5, 7), integers(7, 4)
    with trace() as launches:
        da, db = matmul2d_bwd(dc, a, b, b_gradient=False)
    assert len(launches) == 1 and db is None
    np.testing.assert_array_equal(da, dc @ b.T)
    actual = matmul2d_bwd(dc, a, b, a_gradient=False)
    assert actual.da is None
    np.testing.assert_array_equal(actual.db, a.T @ dc)
    with trace() as launches:
        assert matmul2d_bwd(dc, a, b, a_gradient=False, b_gradient=False) == (None, None)
    assert launches == []


def test_gradients_into_arrays_of_ones_own() -> None:
    """Of other dtypes and strides; beta accumulates."""
    dc, a, b = (integers(*x, dtype=np.float16) for x in ((2, 5, 4), (2, 5, 7), (2, 7, 4)))
    da, db = integers(2, 7, 5).swapaxes(1, 2), integers(2, 7, 9)[:, :, 3:7]
    expected = [x + y for x, y in zip(wanted(dc, a, b, False, False), (da, db), strict=True)]
    actual = bmm_bwd(dc, a, b, da=da, db=db, beta=1)
    assert actual.da is da and actual.db is db
    np.testing.assert_array_equal(da, expected[0])
    np.testing.assert_array_equal(db, expected[1])


# ---------------------------------------------------------------- broadcast inputs


def repeated(x: Array, axes: str) -> Array:
    """[B, H, M, K] that repeats its first entries along axes."""
    keep = tuple(slice(0, 1) if name in axes else slice(None) for name in "bhrc")
    return np.broadcast_to(x[keep].copy(), x.shape)


@pytest.mark.parametrize("axes", ["b", "h", "bh", "r", "br", "hr", "bhr", "c", "bc", "hc", "bhc"])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_broadcast_input_gets_the_sum(axes: str, group: int, transposed: bool) -> None:
    """Where it repeats it has extent 1; one launch, whether two strides walk what is summed or
    not."""
    heads, few = 4, 4 // group
    a = repeated(integers(3, heads, *((7, 5) if transposed else (5, 7))), axes)
    b = repeated(integers(3, few, *((4, 7) if transposed else (7, 4))), axes)
    dc = integers(3, heads, 5, 4)
    expected = wanted(dc, a, b, transposed, transposed)
    for i, name in enumerate("ab"):
        with trace() as launches:
            actual = bmm_bwd(
                dc,
                a,
                b,
                a_transposed=transposed,
                b_transposed=transposed,
                a_gradient=name == "a",
                b_gradient=name == "b",
            )[i]
        assert len(launches) == 1
        assert actual.shape == expected[i].shape
        np.testing.assert_array_equal(actual, expected[i])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (3,), (0, 1), (1, 2), (0, 1, 2), (0, 1, 3)])
def test_gradients_that_are_not_summed(axes: tuple[int, ...], transposed: bool) -> None:
    """Of the input's whole shape, in one launch each; heads that share a b are summed all the
    same."""
    whole_a, whole_b = ((2, 4, 7, 5), (2, 2, 4, 7)) if transposed else ((2, 4, 5, 7), (2, 2, 7, 4))
    a, b = (
        np.broadcast_to(integers(*(1 if i in axes else n for i, n in enumerate(s))), s)
        for s in (whole_a, whole_b)
    )
    dc = integers(2, 4, 5, 4)
    options = {"a_transposed": transposed, "b_transposed": transposed}
    with trace() as launches:
        actual = bmm_bwd(dc, a, b, sum_repeats=False, **options)
    assert len(launches) == 2
    for result, expected in zip(
        actual, wanted(dc, a.copy(), b.copy(), transposed, transposed), strict=True
    ):
        np.testing.assert_array_equal(result, expected)
    with pytest.raises(InvalidValue, match="^sum_repeats = 1: must be True or False"):
        bmm_bwd(dc, a, b, sum_repeats=1, **options)  # type: ignore[arg-type]


def test_common_requests_are_never_refused() -> None:
    """A weight for a whole batch, keys for a group, rows for all: of contiguous arrays, token-major
    ones too."""
    weight, x, dc = integers(7, 4), integers(6, 5, 7), integers(6, 5, 4)
    da, db = bmm_bwd(dc, x, np.broadcast_to(weight, (6, 7, 4)))
    assert db.shape == (1, 7, 4)
    np.testing.assert_array_equal(db[0], np.einsum("bmk,bmn->kn", x, dc))
    np.testing.assert_array_equal(da, dc @ weight.T)
    # [B, S, H, D], [B, S_k, H_kv, D]
    q, k, dscores = integers(2, 5, 6, 8), integers(2, 9, 2, 8), integers(2, 6, 5, 9)
    dq, dk = bmm_bwd(dscores, q.swapaxes(1, 2), k.swapaxes(1, 2), b_transposed=True)
    assert (dq.shape, dk.shape) == ((2, 6, 5, 8), (2, 2, 9, 8))
    np.testing.assert_array_equal(
        dk, np.einsum("bgnij,bignd->bgjd", dscores.reshape(2, 2, 3, 5, 9), q.reshape(2, 5, 2, 3, 8))
    )
    row = np.broadcast_to(integers(7), (6, 5, 7))
    da, _ = bmm_bwd(dc, row, integers(6, 7, 4), b_gradient=False)
    assert da.shape == (1, 1, 7)


def test_axes_that_two_strides_do_not_walk_are_a_list_of_addresses() -> None:
    """Accumulated into arrays of one's own; what shares memory is refused by the arrays' names."""
    dc, b = integers(2, 9, 10, 10)[:, :6, :5, :4], integers(2, 3, 7, 4)
    a = np.broadcast_to(integers(7), (2, 6, 5, 7))
    before = integers(1, 1, 1, 7)
    da, after = before.copy(), np.einsum("bhmn,bhkn->k", dc, np.repeat(b, 2, axis=1))
    with trace() as launches:
        bmm_bwd(dc, a, b, da=da, alpha=2, beta=-1, b_gradient=False)
    assert len(launches) == 1
    np.testing.assert_array_equal(da, 2 * after - before)
    none = np.broadcast_to(integers(7), (2, 6, 5, 7))
    da, _ = bmm_bwd(dc[..., :0], none, b[..., :0], b_gradient=False)
    np.testing.assert_array_equal(da, np.zeros((1, 1, 1, 7)))
    memory = integers(2 * 9 * 10 * 10)
    within = memory.reshape(2, 9, 10, 10)[:, :6, :5, :4]
    with pytest.raises(
        InvalidValue, match=r"da = 0x[0-9a-f]+: (is also|overlaps the matrix of) dc"
    ):
        bmm_bwd(within, a, b, da=memory[:7].reshape(1, 1, 1, 7), b_gradient=False)


shapes = st.fixed_dictionaries(
    {
        "B": st.integers(1, 3),
        "H_b": st.integers(1, 2),
        "group": st.integers(1, 3),
        "M": st.integers(1, 4),
        "N": st.integers(1, 4),
        "K": st.integers(1, 4),
        "ta": st.booleans(),
        "tb": st.booleans(),
        "axes": st.integers(2, 4),
    }
)
walks = st.tuples(
    st.booleans(), st.booleans(), st.sets(st.integers(0, 3), max_size=2), st.sampled_from([0, 3])
)


@settings(max_examples=120)
@given(shapes, st.tuples(walks, walks, walks))
def test_any_strides(s: dict[str, Any], three: tuple[Any, Any, Any]) -> None:
    """What is computed is right; what is refused has no contiguous axis."""
    lead_a, lead_b = {
        2: ((), ()),
        3: ((s["B"],), (s["B"],)),
        4: ((s["B"], s["H_b"] * s["group"]), (s["B"], s["H_b"])),
    }[s["axes"]]
    a = laid((*lead_a, *((s["K"], s["M"]) if s["ta"] else (s["M"], s["K"]))), *three[0])
    b = laid((*lead_b, *((s["N"], s["K"]) if s["tb"] else (s["K"], s["N"]))), *three[1])
    dc = laid((*lead_a, s["M"], s["N"]), *three[2])
    forward, backward = (matmul2d, matmul2d_bwd) if s["axes"] == 2 else (bmm, bmm_bwd)
    expected = wanted(dc, a, b, s["ta"], s["tb"])
    for i in range(2):
        try:
            forward(a, b, a_transposed=s["ta"], b_transposed=s["tb"])
            actual = backward(
                dc,
                a,
                b,
                a_transposed=s["ta"],
                b_transposed=s["tb"],
                a_gradient=i == 0,
                b_gradient=i == 1,
            )[i]
        except InvalidValue as e:
            assert e.rule.startswith("one of the two matrix axes")
            continue
        np.testing.assert_array_equal(actual, expected[i])


def laid(shape: tuple[int, ...], swapped: bool, tokens: bool, repeats: set[int], gap: int) -> Array:
    """Integers in memory as told: matrices transposed, heads within rows, axes repeated, rows with
    gaps."""
    order = list(range(len(shape)))
    if swapped:
        order[-2:] = order[:-3:-1]
    if tokens and len(shape) == 4:
        order[1], order[2] = order[2], order[1]
    own = [1 if i in repeats else n for i, n in enumerate(shape)]
    memory = integers(*(own[i] for i in order[:-1]), own[order[-1]] + gap)[..., : own[order[-1]]]
    return np.broadcast_to(memory.transpose(np.argsort(order)), shape)


# ---------------------------------------------------------------- edges


def test_alpha_0_never_reads() -> None:
    a, b, dc = (
        np.full((5, 7), np.nan, np.float32),
        integers(7, 4),
        np.full((5, 4), np.inf, np.float32),
    )
    for x in matmul2d_bwd(dc, a, b, alpha=0):
        assert not x.any()


def test_refusals(refused: Refused) -> None:
    dc, a, b = integers(2, 5, 4), integers(2, 5, 7), integers(2, 7, 4)
    refused(
        "dc = an array of shape [2, 4, 5]: must have shape [2, 5, 4]. Check the order of the axes.",
        lambda: bmm_bwd(dc.swapaxes(1, 2), a, b),
    )
    refused(
        "da = an array of shape [2, 7, 5]: must have shape [2, 5, 7]. Check the order of the axes.",
        lambda: bmm_bwd(dc, a, b, da=integers(2, 7, 5)),
    )
    refused(
        "db = an array of shape [2, 7, 4]: must have shape [1, 7, 4]. Check the order of the axes.",
        lambda: bmm_bwd(dc, a, np.broadcast_to(b[:1], b.shape), db=integers(2, 7, 4)),
    )
    refused(
        "da = None: is read, because beta = 1.0. Pass the array to add to, or beta=0.",
        lambda: bmm_bwd(dc, a, b, beta=1, db=integers(2, 7, 4)),
    )
    refused(
        "db = given: b_gradient is False. Leave one of the two out.",
        lambda: bmm_bwd(dc, a, b, b_gradient=False, db=integers(2, 7, 4)),
    )
    refused(
        f"db = {hex(b.ctypes.data)}: overlaps dc. Give the output memory of its own.",
        lambda: bmm_bwd(b.reshape(-1)[:40].reshape(2, 5, 4), a, b, a_gradient=False, db=b),
    )
    refused(
        "out_dtype = float64: da is an array of float32. Give one of the two.",
        lambda: bmm_bwd(dc, a, b, da=integers(2, 5, 7), out_dtype="float64"),
    )
