"""The reference projections by their descriptors: blocks, workspaces, what is not written."""

from __future__ import annotations

import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernelseam import (
    OutputProjection,
    OutputProjectionBwd,
    QkvProjection,
    QkvProjectionBwd,
    plan,
    planning,
)
from kernelseam.reference import projection as reference

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(23)
UNTOUCHED = 77.0


def integers(*shape: int, dtype: Any = np.float32) -> Array:
    return RNG.integers(-3, 4, shape).astype(dtype)


def empty(*shape: int, dtype: Any = np.float32) -> Array:
    return np.full(shape, UNTOUCHED, dtype)


def wide(*arrays: Array) -> tuple[Array, ...]:
    return tuple(x.astype(np.float64) for x in arrays)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that every problem has many, along every axis."""
    for name, size in (("_ROWS", 3), ("_COLUMNS", 5), ("_SUMMANDS", 4)):
        monkeypatch.setattr(reference, name, size)
    planning.forget()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_blocks_along_every_axis(dtype: Any) -> None:
    """Of integers the sums are exact, whatever their order."""
    B, S, K, H, G, D = 2, 7, 11, 3, 2, 6
    x, w, bias = (
        integers(B, S, K, dtype=dtype),
        integers((H + 2 * G) * D, K, dtype=dtype),
        integers((H + 2 * G) * D),
    )
    q, k, v = (empty(B, n, S, D, dtype=dtype) for n in (H, G, G))
    plan(QkvProjection.from_arrays(x, w, q, k, v, bias=bias)).bind()()
    want = (wide(x)[0] @ wide(w)[0].T + bias).reshape(B, S, H + 2 * G, D).swapaxes(1, 2)
    for got, part in zip((q, k, v), np.split(want, [H, H + G], axis=1), strict=True):
        np.testing.assert_array_equal(got, part.astype(dtype))
    a, o, residual = (
        integers(B, H, S, D, dtype=dtype),
        integers(K, H * D, dtype=dtype),
        integers(B, S, K, dtype=dtype),
    )
    out = empty(B, S, K, dtype=dtype)
    plan(OutputProjection.from_arrays(a, o, out, residual=residual)).bind()()
    rows = wide(a)[0].swapaxes(1, 2).reshape(B, S, H * D)
    np.testing.assert_array_equal(out, (rows @ wide(o)[0].T + wide(residual)[0]).astype(dtype))
    d = integers(B, S, K, dtype=dtype)
    d_a, d_o, d_b = (
        empty(B, H, S, D, dtype=dtype),
        empty(K, H * D, dtype=dtype),
        empty(K, dtype=np.float32),
    )
    if dtype is np.float64:
        d_b = empty(K, dtype=np.float64)
    plan(
        OutputProjectionBwd.from_arrays(
            d, attn_out=a, weight=o, d_attn_out=d_a, d_weight=d_o, d_bias=d_b
        )
    ).bind()()
    want = (wide(d)[0] @ wide(o)[0]).reshape(B, S, H, D).swapaxes(1, 2)
    np.testing.assert_array_equal(d_a, want.astype(dtype))
    np.testing.assert_array_equal(d_o, np.einsum("bsk,bsn->kn", wide(d)[0], rows).astype(dtype))
    np.testing.assert_array_equal(d_b, wide(d)[0].sum((0, 1)))
    dq, dk, dv = (integers(B, n, S, D, dtype=dtype) for n in (H, G, G))
    d_x, d_w, d_bias = (
        empty(B, S, K, dtype=dtype),
        empty(*w.shape, dtype=dtype),
        empty(len(w), dtype=d_b.dtype),
    )
    plan(
        QkvProjectionBwd.from_arrays(
            dq, dk, dv, input=x, weight=w, d_input=d_x, d_weight=d_w, d_bias=d_bias
        )
    ).bind()()
    rows = np.concatenate(wide(dq, dk, dv), axis=1).swapaxes(1, 2).reshape(B, S, -1)
    np.testing.assert_array_equal(d_x, (rows @ wide(w)[0]).astype(dtype))
    np.testing.assert_array_equal(d_w, np.einsum("bsn,bsk->nk", rows, wide(x)[0]).astype(dtype))
    np.testing.assert_array_equal(d_bias, rows.sum((0, 1)))


@pytest.mark.usefixtures("small_blocks")
def test_pages_that_no_token_goes_to_are_not_written() -> None:
    x, w = integers(1, 5, 4), integers(8, 4)
    q, k, v = empty(1, 2, 5, 2), empty(4, 3, 1, 2), empty(4, 3, 1, 2)
    positions = np.array([[7, 0, 1, 3, 2]], np.int32)
    plan(
        QkvProjection.from_arrays(
            x, w, q, k, v, positions=positions, block_table=np.array([[3, 0, 1]], np.int32)
        )
    ).bind()()
    want = x[0] @ w.T
    for pages, columns in ((k, slice(4, 6)), (v, slice(6, 8))):
        written = np.zeros(pages.shape, bool)
        for row, at in enumerate(positions[0]):
            page = (3, 0, 1)[at // 3]
            np.testing.assert_array_equal(pages[page, at % 3, 0], want[row, columns])
            written[page, at % 3] = True
        assert (pages[~written] == UNTOUCHED).all() and written.sum() == 10


def test_gaps_are_not_written() -> None:
    x, w = integers(2, 3, 4), integers(12, 4)
    room = empty(2, 3, 8, 2)
    q, k, v = room[:, :, 0:4], room[:, :, 5:6], room[:, :, 7:8]
    plan(QkvProjection.from_arrays(x, w, q, k, v, layout="bshd")).bind()()
    assert (room[:, :, [4, 6]] == UNTOUCHED).all() and (
        room[:, :, [0, 1, 2, 3, 5, 7]] != UNTOUCHED
    ).all()


def test_memory_is_that_of_blocks() -> None:
    x, w = np.ones((1, 6000, 512), np.float16), np.ones((3 * 512, 512), np.float16)
    q, k, v = (np.empty((1, 6000, 8, 64), np.float16) for _ in "qkv")
    made = plan(QkvProjection.from_arrays(x, w, q, k, v, layout="bshd"))
    assert made.workspace_bytes < 4 << 20
    call = made.bind()
    tracemalloc.start()
    try:
        call()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20 and (q == 512).all()
