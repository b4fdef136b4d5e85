"""attention on host arrays, against the formula in float64."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import kernelseam
import ml_dtypes
import numpy as np
import pytest
from attention_formula import attention
from kernelseam.errors import InvalidValue

Array = np.ndarray[Any, Any]
Refused = Callable[[str, Callable[[], object]], None]
RNG = np.random.default_rng(21)
ROUNDOFF = {
    np.float16: 2.0**-11,
    ml_dtypes.bfloat16: 2.0**-8,
    np.float32: 2.0**-24,
    np.float64: 2.0**-53,
}


def normal(*shape: int, dtype: Any = np.float32) -> Array:
    return RNG.standard_normal(shape).astype(dtype)


def check(
    q: Array, k: Array, v: Array, causal: bool = False, scale: float | None = None, **options: Any
) -> Array:
    """Run and compare; returns the result."""
    y, lse = kernelseam.attention(q, k, v, causal=causal, scale=scale, return_lse=True, **options)
    if options.get("layout") == "bshd":
        q, k, v, actual = (x.swapaxes(1, 2) for x in (q, k, v, y))
    else:
        actual = y
    expected, want_lse = attention(q, k, v, causal=causal, scale=scale)
    pv, _ = attention(q, k, abs(v), causal=causal, scale=scale)
    D = q.shape[3]
    q_norm, k_norm = (np.sqrt((x.astype(np.float64) ** 2).sum(-1)).max(initial=0) for x in (q, k))
    logits = abs(1 / np.sqrt(max(D, 1)) if scale is None else scale) * q_norm * k_norm
    unit = 2.0**-53 if q.dtype == np.float64 else 2.0**-24
    error = 8 * unit * (np.sqrt(k.shape[2]) + np.sqrt(D) * logits)
    assert y.dtype == q.dtype and lse.dtype == (np.float64 if q.dtype == np.float64 else np.float32)
    assert actual.shape == expected.shape and lse.shape == want_lse.shape
    tiny = float(ml_dtypes.finfo(q.dtype).smallest_subnormal)
    assert (
        abs(actual.astype(np.float64) - expected)
        <= 2 * ROUNDOFF[q.dtype.type] * abs(expected) + error * pv + tiny
    ).all()
    some = np.isfinite(want_lse)
    np.testing.assert_array_equal(lse[~some], want_lse[~some])
    assert (abs(lse[some] - want_lse[some]) <= 2 * unit * (1 + abs(want_lse[some])) + error).all()
    return y


@pytest.mark.parametrize("dtype", list(ROUNDOFF))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("S_q", "S_k"), [(1, 1), (7, 63), (65, 64), (63, 1), (129, 300), (300, 129)]
)
def test_sizes(dtype: Any, causal: bool, S_q: int, S_k: int) -> None:
    q, k, v = (normal(1, 2, n, d, dtype=dtype) for n, d in ((S_q, 32), (S_k, 32), (S_k, 40)))
    check(q, k, v, causal)


@pytest.mark.parametrize("causal", [False, True])
def test_several_blocks_of_queries_and_keys(causal: bool) -> None:
    q, k, v = normal(1, 1, 600, 16), normal(1, 1, 2500, 16), normal(1, 1, 2500, 8)
    k[0, 0, :, 0] = np.arange(2500) / 64  # the maximum moves from block to block, and away again
    k[0, 0, 2000:, 0] *= -1
    q[..., 0] = 4
    check(q, k, v, causal)


@pytest.mark.parametrize("heads", [(6, 1), (6, 2), (6, 6)])
def test_grouped_heads(heads: tuple[int, int]) -> None:
    H, H_kv = heads
    check(normal(2, H, 9, 16), normal(2, H_kv, 20, 16), normal(2, H_kv, 20, 24), causal=True)


def test_packed_projections_are_walked_without_a_copy() -> None:
    qkv = normal(2, 33, 3, 4, 16, dtype=np.float16)  # [B, S, (q, k, v), H, D]
    q, k, v = (qkv[:, :, i] for i in range(3))
    out = np.full((2, 33, 8, 16), np.nan, np.float16)
    y = check(q, k, v, causal=True, layout="bshd", out=out[:, :, ::2])
    assert np.shares_memory(y, out) and np.isnan(out[:, :, 1::2]).all()
    np.testing.assert_array_equal(
        y.swapaxes(1, 2), kernelseam.attention(*(x.swapaxes(1, 2) for x in (q, k, v)), causal=True)
    )


def test_stride_0_and_gaps() -> None:
    k = np.broadcast_to(normal(1, 1, 50, 16), (3, 2, 50, 16))
    v = normal(3, 2, 100, 64)[:, :, ::2, 8:24]
    one_key = np.broadcast_to(normal(3, 2, 1, 16), (3, 2, 50, 16))
    q = normal(3, 2, 20, 32)[:, :, :, :16]
    check(q, k, v)
    check(q, one_key, v, causal=True)


@pytest.mark.parametrize("scale", [0.0, -0.7, 1e-3, 40.0])
def test_scales(scale: float) -> None:
    check(normal(1, 2, 40, 8), normal(1, 2, 70, 8), normal(1, 2, 70, 8), True, scale)


def test_extreme_scores() -> None:
    q, k = normal(1, 1, 20, 16) * 1e3, normal(1, 1, 30, 16) * 1e3
    y = check(q, k, normal(1, 1, 30, 16))
    assert np.isfinite(y).all()


def test_queries_that_see_no_key() -> None:
    q, k, v = normal(1, 2, 10, 8), normal(1, 2, 4, 8), normal(1, 2, 4, 8)
    q[:, :, 2] = np.nan  # depends on nothing, so neither does its result on it
    y, lse = kernelseam.attention(q, k, v, causal=True, return_lse=True)
    np.testing.assert_array_equal(y[:, :, :6], 0)
    np.testing.assert_array_equal(lse[:, :, :6], -np.inf)
    assert np.isfinite(y[:, :, 6:]).all() and (y[:, :, 6:] != 0).any()
    check(q[:, :, 3:], k, v, causal=True)


@pytest.mark.parametrize("causal", [False, True])
def test_empties(causal: bool) -> None:
    q, k, v = normal(2, 3, 5, 8), normal(2, 3, 0, 8), normal(2, 3, 0, 6)
    y, lse = kernelseam.attention(q, k, v, causal=causal, return_lse=True)
    np.testing.assert_array_equal(y, np.zeros((2, 3, 5, 6), np.float32))
    np.testing.assert_array_equal(lse, np.full((2, 3, 5), -np.inf, np.float32))
    for shape in ((0, 3, 5, 8), (2, 0, 5, 8), (2, 3, 0, 8)):
        k = normal(shape[0], shape[1], 7, 8)
        assert kernelseam.attention(normal(*shape), k, k, causal=causal).shape == shape
    q, k, v = normal(1, 2, 3, 8), normal(1, 2, 7, 8), normal(1, 2, 7, 0)
    assert check(q, k, v, causal).shape == (1, 2, 3, 0)
    # nothing of q, k and v is read
    assert kernelseam.attention(q, k, v, causal=causal).shape == (1, 2, 3, 0)
    check(normal(1, 2, 3, 0), normal(1, 2, 7, 0), normal(1, 2, 7, 4), causal, scale=1.0)


def dirty_rows(y: Array, clean: Array) -> set[int]:
    """Rows in which y differs from clean."""
    return {
        int(i) for i in np.unique(np.nonzero(~((y == clean) | (np.isnan(y) & np.isnan(clean))))[2])
    }


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize(("S_q", "S_k"), [(40, 40), (300, 310), (20, 1200)])
def test_a_causal_mask_keeps_out_what_is_not_finite(
    value: float, where: str, S_q: int, S_k: int
) -> None:
    x = {"q": normal(1, 1, S_q, 8), "k": normal(1, 1, S_k, 8), "v": normal(1, 1, S_k, 8)}
    clean = kernelseam.attention(**x, causal=True)
    at = S_q // 2 if where == "q" else S_k - S_q // 2 - 1
    x[where][0, 0, at, 3] = value
    y, lse = kernelseam.attention(**x, causal=True, return_lse=True)
    first = at if where == "q" else at - (S_k - S_q)
    row_by_row = y[0, 0, :first], clean[0, 0, :first]
    # another order of summing, nothing else
    np.testing.assert_allclose(*row_by_row, rtol=1e-4, atol=1e-6)
    assert np.isfinite(lse[0, 0, :first]).all()
    expected, want_lse = attention(x["q"], x["k"], x["v"], causal=True)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(y), np.isinf(expected))
    np.testing.assert_array_equal(np.isnan(lse), np.isnan(want_lse))
    if where == "q":
        np.testing.assert_array_equal(y[0, 0, first + 1 :], clean[0, 0, first + 1 :])
    else:
        assert (
            np.isnan(y[0, 0, first:]).any() or np.isinf(y[0, 0, first:]).any() or value == -np.inf
        )


def test_a_row_whose_every_score_is_minus_inf_gives_zeros() -> None:
    q, k, v = abs(normal(1, 1, 5, 4)), abs(normal(1, 1, 6, 4)), normal(1, 1, 6, 4)
    k[..., 1] = -np.inf
    y, lse = kernelseam.attention(q, k, v, return_lse=True)
    np.testing.assert_array_equal(y, 0)
    np.testing.assert_array_equal(lse, -np.inf)
    k[0, 0, 4, 1] = 1  # one key is left
    one = np.broadcast_to(v[:, :, 4:5], v[:, :, :5].shape)  # its weight over itself, rounded
    np.testing.assert_allclose(kernelseam.attention(q, k, v), one, rtol=2**-22)


def test_memory_does_not_grow_with_the_square(monkeypatch: pytest.MonkeyPatch) -> None:
    # each thread has a workspace
    monkeypatch.setattr("kernelseam.reference.threads.MOST", 2)

    def peak(S: int) -> int:
        x = normal(1, 1, S, 16)
        out = np.empty_like(x)
        kernelseam.attention(x[:, :, :64], x[:, :, :64], x[:, :, :64])  # everything imported
        tracemalloc.start()
        kernelseam.attention(x, x, x, causal=True, out=out)
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    small, large = peak(2048), peak(16384)
    assert large < 4 * 2**20 < 16384**2 * 4 // 100
    assert large < 1.5 * small


def test_threads_and_serial_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernelseam import planning

    q, k, v = normal(1, 3, 700, 16), normal(1, 1, 900, 16), normal(1, 1, 900, 16)
    shared = kernelseam.plan(
        kernelseam.Attention.from_arrays(q, k, v, np.empty_like(q)), backend="numpy"
    )
    y, z = np.empty_like(q), np.empty_like(q)
    shared.bind(out=y)()
    planning.forget()
    monkeypatch.setattr("kernelseam.reference.threads._SERIAL", float("inf"))
    alone = kernelseam.plan(kernelseam.Attention.from_arrays(q, k, v, z), backend="numpy")
    alone.bind()()
    planning.forget()
    np.testing.assert_array_equal(y, z)
    assert alone.workspace_bytes < 4 * 2**20


def test_a_call_is_one_launch() -> None:
    x = normal(4, 4, 100, 16)
    with kernelseam.trace() as records:
        kernelseam.attention(x, x, x)
    (record,) = records
    assert (record.kernel, record.grid, record.arch) == ("numpy_attention", (1, 4, 4), "cpu")


def test_refusals(refused: Refused) -> None:
    q, k, v = normal(1, 4, 5, 8), normal(1, 2, 6, 8), normal(1, 2, 6, 8)
    call = kernelseam.attention
    refused(
        "q = an array of shape [4, 5, 8]: must have 4 axes, [B, H, S, D]. Add or remove axes "
        "with reshape.",
        lambda: call(q[0], k, v),
    )
    refused(
        "layout = hsbd: must be one of bhsd, bshd. Name the order of the axes.",
        lambda: call(q, k, v, layout="hsbd"),
    )
    refused(
        "scale = nan: must be finite. Give a finite number, or None for the default.",
        lambda: call(q, k, v, scale=float("nan")),
    )
    refused("causal = 1: must be True or False. Pass a bool.", lambda: call(q, k, v, causal=1))
    refused(
        "q = num_heads 4: must be a multiple of kv_heads = 3. Make num_heads a multiple of "
        "kv_heads.",
        lambda: call(q, normal(1, 3, 6, 8), normal(1, 3, 6, 8)),
    )
    refused(
        "k = an array of shape [1, 2, 6, 9]: must be [B=1, H_kv, S_k, D=8]. Check the order of "
        "the axes of all arrays.",
        lambda: call(q, normal(1, 2, 6, 9), v),
    )
    refused(
        "v = an array of shape [1, 2, 7, 8]: must be [B=1, H_kv=2, S_k=6, D_v]. Check the order "
        "of the axes of all arrays.",
        lambda: call(q, k, normal(1, 2, 7, 8)),
    )
    refused(
        "k = an array of float16: must be float32 as q is. Convert the array, or correct the "
        "dtype.",
        lambda: call(q, k.astype(np.float16), v),
    )
    refused(
        "v = strides [192, 96, 16, 2]: the last axis must be contiguous (stride 1). Copy the "
        "array into a contiguous one.",
        lambda: call(q, k, normal(1, 2, 6, 16)[..., ::2]),
    )
    refused(
        "k = strides [96, 48, -8, 1]: must not be negative. Copy the array first.",
        lambda: call(q, k[:, :, ::-1], v),
    )
    refused(
        "out = an array of shape [1, 4, 5, 7]: must be [B=1, H=4, S_q=5, D_v=8]. Check the order "
        "of the axes of all arrays.",
        lambda: call(q, k, v, out=normal(1, 4, 5, 7)),
    )
    with pytest.raises(
        InvalidValue, match=r"^out = 0x[0-9a-f]+: overlaps q\. Give the output memory"
    ):
        call(q, k, v, out=q)
    with pytest.raises(InvalidValue, match=r"^out = head stride 0: .*of out share elements"):
        call(q, k, v, out=np.lib.stride_tricks.as_strided(normal(5, 8), q.shape, (0, 0, 32, 4)))
