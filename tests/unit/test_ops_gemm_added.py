"""bmm and matmul2d with a bias, a residual and a result of another dtype, in one launch."""

from __future__ import annotations

from typing import Any

import kernelseam
import ml_dtypes
import numpy as np
import pytest
from kernelseam import bmm, matmul2d, trace
from refusals import Refused

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(21)


def integers(*shape: int, dtype: Any = np.float32) -> Array:
    return RNG.integers(-3, 4, shape).astype(dtype)


def wide(x: Array) -> Array:
    return x.astype(np.float64)


@pytest.mark.parametrize("shape", [(7,), (2, 7), (2, 1), (1, 7)])
def test_a_bias_of_a_batch(shape: tuple[int, ...]) -> None:
    a, b = integers(2, 5, 6), integers(2, 6, 7)
    if shape[-1] == 1:
        b = b[:, :, :1]
    bias = integers(*shape)
    with trace() as launches:
        y = bmm(a, b, bias=bias)
    assert len(launches) == 1
    np.testing.assert_array_equal(y, a @ b + (bias if bias.ndim == 1 else bias[:, None]))


@pytest.mark.parametrize("shape", [(7,), (4, 7), (2, 4, 7), (2, 1, 7), (1, 4, 7), (1, 1, 7)])
def test_a_bias_of_heads(shape: tuple[int, ...]) -> None:
    a, b, bias = integers(2, 4, 5, 6), integers(2, 2, 6, 7), integers(*shape)
    expected = a @ np.repeat(b, 2, axis=1) + (bias if bias.ndim == 1 else bias[..., None, :])
    np.testing.assert_array_equal(bmm(a, b, bias=bias), expected)


def test_everything_at_once_in_two_axes() -> None:
    a, b, bias = (integers(*s, dtype=np.float16) for s in ((5, 64), (64, 7), (7,)))
    residual, out = integers(5, 7), integers(5, 7)
    expected = 2 * (wide(a) @ wide(b)) - out + bias + residual
    with trace() as launches:
        y = matmul2d(a, b, alpha=2, beta=-1, bias=bias, residual=residual, out=out)
    assert y is out and len(launches) == 1
    np.testing.assert_array_equal(out, expected)


def test_another_dtype_of_the_result() -> None:
    a, b = (RNG.standard_normal(s).astype(np.float16) for s in ((2, 5, 600), (2, 600, 7)))
    y = bmm(a, b, out_dtype="float32", bias=np.ones(7, ml_dtypes.bfloat16))
    assert y.dtype == np.float32
    assert abs(y - (wide(a) @ wide(b) + 1)).max() < 1e-3 < abs(y.astype(np.float16) - y).max()
    assert bmm(a, b, out_dtype=kernelseam.DType.float16).dtype == np.float16
    assert matmul2d(a[0], b[0], out_dtype=np.float64).dtype == np.float64


@pytest.mark.parametrize("kind", ["gaps", "token-major", "batch", "heads", "rows"])
def test_a_residual_of_any_strides(kind: str) -> None:
    a, b = integers(2, 4, 5, 6), integers(2, 4, 6, 7)
    residual = {
        "gaps": integers(4, 8, 5, 9)[::2, ::2, :, 1:8],
        "token-major": integers(2, 5, 4, 7).transpose(0, 2, 1, 3),
        "batch": np.broadcast_to(integers(4, 5, 7), (2, 4, 5, 7)),
        "heads": np.broadcast_to(integers(2, 1, 5, 7), (2, 4, 5, 7)),
        "rows": np.broadcast_to(integers(2, 4, 1, 7), (2, 4, 5, 7)),
    }[kind]
    np.testing.assert_array_equal(bmm(a, b, residual=residual), a @ b + residual)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_residual_may_be_out(transposed: bool) -> None:
    a, b, memory = integers(2, 5, 6), integers(2, 6, 5), integers(2, 5, 5)
    out = memory.swapaxes(1, 2) if transposed else memory
    expected = a @ b + out
    assert bmm(a, b, residual=out, out=out) is out
    np.testing.assert_array_equal(out, expected)


def test_a_column_major_residual_goes_with_a_column_major_out() -> None:
    a, b, residual = integers(2, 4, 5, 6), integers(2, 2, 6, 7), integers(2, 4, 7, 5).swapaxes(2, 3)
    memory = np.full((2, 4, 7, 5), np.nan, np.float32)
    bmm(a, b, residual=residual, out=memory.swapaxes(2, 3))
    np.testing.assert_array_equal(memory.swapaxes(2, 3), a @ np.repeat(b, 2, axis=1) + residual)


def test_plans_tell_bias_from_residual() -> None:
    """Of one shape, dtype and strides: what is remembered of one call must not serve the other."""
    a, b, x = integers(1, 1, 6), integers(1, 6, 7), integers(1, 1, 7)
    np.testing.assert_array_equal(bmm(a, b, bias=x[0]), a @ b + x)
    np.testing.assert_array_equal(bmm(a, b, residual=x), a @ b + x)
    np.testing.assert_array_equal(bmm(a, b, bias=x[:, 0], residual=2 * x), a @ b + 3 * x)
    np.testing.assert_array_equal(bmm(a, b), a @ b)


def test_refusals(refused: Refused) -> None:
    a, b = integers(2, 3, 4), integers(2, 4, 5)
    bias, residual, out = integers(5), integers(2, 3, 5), integers(2, 5, 3).swapaxes(1, 2)
    words = "A bias has no row axis: add batch or head axes with reshape."
    refused(
        f"bias = an array of shape [4]: must be [N=5], or broadcast to [2, 5]. {words}",
        lambda: bmm(a, b, bias=integers(4)),
    )
    refused(
        f"bias = an array of shape [3, 5]: must be [N=5], or broadcast to [2, 5]. {words}",
        lambda: bmm(a, b, bias=integers(3, 5)),
    )
    refused(
        f"bias = an array of shape []: must be [N=5], or broadcast to [5]. {words}",
        lambda: matmul2d(a[0], b[0], bias=np.zeros((), np.float32)),
    )
    refused(
        "bias = an array of float64: must be no wider than float32, in which it is added. "
        "Convert it.",
        lambda: bmm(a, b, bias=bias.astype(np.float64)),
    )
    refused(
        "residual = an array of shape [3, 5]: must have shape [2, 3, 5]. Check the order of the "
        "axes.",
        lambda: bmm(a, b, residual=residual[0]),
    )
    refused(
        "residual = strides [15, 1, 3]: must be contiguous along the same axis as out. Copy it, "
        "or give out with the same order of axes.",
        lambda: bmm(a, b, residual=out),
    )
    refused(
        "out = strides [15, 1, 3]: must have contiguous rows where a bias is added. Give a "
        "row-major array.",
        lambda: bmm(a, b, bias=bias, out=out),
    )
    refused(
        f"out = {hex(residual.ctypes.data)}: overlaps residual. Give the output memory of its own.",
        lambda: bmm(a, b, beta=1, residual=residual, out=residual),
    )
    refused(
        "out_dtype = float32: out is an array of float16. Give one of the two.",
        lambda: bmm(a, b, out=residual.astype(np.float16), out_dtype="float32"),
    )
