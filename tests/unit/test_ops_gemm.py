"""bmm and matmul2d on host arrays of any strides, against plain float64 products;
tests/parity/test_arrays.py has their dtypes and transposes."""

from __future__ import annotations

from typing import Any

import kernelseam
import ml_dtypes
import numpy as np
import pytest
from kernelseam.errors import InvalidValue
from refusals import Refused

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(20)


def normal(*shape: int, dtype: Any = np.float32) -> Array:
    return RNG.standard_normal(shape).astype(dtype)


def near(
    y: Array, a: Array, b: Array, alpha: float = 1, old: Array | float = 0, dtype: Any = np.float32
) -> None:
    """y = alpha·a·b + old within the rounding of dtype and of float32 sums, elementwise."""
    x, z = a.astype(np.float64), b.astype(np.float64)
    expected = alpha * (x @ z) + old
    info = ml_dtypes.finfo(dtype)
    bound = abs(alpha) * (abs(x) @ abs(z)) + abs(old)
    sums = 2.0**-53 if dtype == np.float64 else 2.0**-24
    limit = float(info.eps) * abs(expected) + 4 * np.sqrt(x.shape[-1] + 4) * sums * bound
    assert y.dtype == dtype
    assert y.shape == expected.shape
    assert (abs(y.astype(np.float64) - expected) <= limit).all()


@pytest.mark.parametrize("flag", [False, True])
def test_an_array_contiguous_along_its_other_axis_is_a_transpose(flag: bool) -> None:
    a, b = normal(2, 6, 9).swapaxes(1, 2), normal(2, 4, 6).swapaxes(1, 2)
    call = kernelseam.bmm(
        a.swapaxes(1, 2) if flag else a,
        b.swapaxes(1, 2) if flag else b,
        a_transposed=flag,
        b_transposed=flag,
    )
    near(call, a, b)


@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
def test_a_transposed_out_is_written_in_place(a_transposed: bool, b_transposed: bool) -> None:
    a, b, memory = normal(2, 5, 7), normal(2, 7, 3), normal(2, 3, 5)
    out, old = memory.swapaxes(1, 2), memory.swapaxes(1, 2).astype(np.float64)
    y = kernelseam.bmm(
        np.ascontiguousarray(a.swapaxes(1, 2)) if a_transposed else a,
        np.ascontiguousarray(b.swapaxes(1, 2)) if b_transposed else b,
        a_transposed=a_transposed,
        b_transposed=b_transposed,
        alpha=2,
        beta=-0.5,
        out=out,
    )
    assert y is out
    near(memory.swapaxes(1, 2), a, b, 2, -0.5 * old)


def test_two_axes_and_vectors() -> None:
    a, b = normal(4, 6), normal(6, 1)
    near(kernelseam.matmul2d(a, b), a, b)
    near(kernelseam.matmul2d(b, a, a_transposed=True, b_transposed=True), b.T, a.T)
    column = normal(6, 5)[:, 2:3]
    near(kernelseam.matmul2d(a, column), a, column)
    row = normal(12)[None, ::2]
    near(kernelseam.matmul2d(row, b), row, b)


def test_heads_share_matrices_of_b() -> None:
    a, b = normal(2, 6, 5, 8), normal(2, 3, 8, 4)
    near(kernelseam.bmm(a, b), a, np.repeat(b, 2, axis=1))
    packed = normal(2, 7, 3, 8)  # token-major: a row's heads lie together
    y = kernelseam.bmm(a, packed.transpose(0, 2, 1, 3), b_transposed=True)
    near(y, a, np.repeat(packed.transpose(0, 2, 3, 1), 2, axis=1))


def test_gaps_and_broadcasts_are_walked_without_a_copy() -> None:
    whole = normal(4, 9, 16)
    a, b = whole[::2, 1:8:2, 3:9], np.broadcast_to(normal(6, 5), (2, 6, 5))
    out = np.full((2, 10, 12), np.nan, np.float32)
    y = kernelseam.bmm(a, b, out=out[:, ::3, 4:9])
    near(y, a, b)
    assert np.isnan(out).sum() == out.size - y.size
    one_row = np.broadcast_to(normal(1, 6), (4, 6))
    near(kernelseam.matmul2d(one_row, b[0]), one_row, b[0])


def test_beta_0_never_reads_and_alpha_0_never_reads_the_inputs() -> None:
    a, b, out = normal(4, 4), normal(4, 4), np.full((4, 4), np.nan, np.float32)
    near(kernelseam.matmul2d(a, b, out=out), a, b)
    a[:], c = np.nan, normal(4, 4)
    old = c.copy()
    np.testing.assert_array_equal(kernelseam.matmul2d(a, b, alpha=0, beta=0.5, out=c), 0.5 * old)
    np.testing.assert_array_equal(kernelseam.matmul2d(a, b, alpha=0), np.zeros((4, 4), np.float32))


def test_refusals(refused: Refused) -> None:
    a, b = normal(2, 3, 4), normal(2, 4, 5)
    frozen = normal(2, 3, 5)
    frozen.flags.writeable = False
    matmul2d, bmm = kernelseam.matmul2d, kernelseam.bmm
    refused(
        "a = an array of shape [3]: must have 3 axes, [B, M, K]. Add or remove axes with reshape.",
        lambda: bmm(a[0, :, 0], b),
    )
    refused(
        "b = an array of shape [2, 4, 5]: must have K = 4 columns, as a of shape [2, 3, 4] says. "
        "Check the order of the axes, a_transposed and b_transposed.",
        lambda: bmm(a, b, b_transposed=True),
    )
    refused(
        "b = an array of shape [1, 4, 5]: must have as many batches as a, 2. Expand the array of "
        "one batch (a stride of 0 is fine).",
        lambda: bmm(a, b[:1]),
    )
    whole = np.ones((2, 2), np.int32)
    refused(
        "a.dtype = int32: must be one of float16, bfloat16, float32, float64, float8_e4m3fn, "
        "float8_e4m3fnuz. Convert the array or name one of these.",
        lambda: matmul2d(whole, whole),
    )
    refused(
        "b = an array of shape [1, 2, 2, 2]: 3 heads must be a multiple of its 2. Check the order "
        "of the axes of all arrays.",
        lambda: bmm(normal(1, 3, 2, 2), normal(1, 2, 2, 2)),
    )
    refused(
        "b = an array of float64: must be float32 as a is. Convert one of them.",
        lambda: bmm(a, b.astype(np.float64)),
    )
    refused(
        "out = None: is read, because beta = 1.0. Pass the array to add to, or beta=0.",
        lambda: bmm(a, b, beta=1),
    )
    refused(
        "out = an array of shape [2, 5, 3]: must have shape [2, 3, 5]. Check the order of the "
        "axes.",
        lambda: bmm(a, b, out=normal(2, 5, 3)),
    )
    refused(
        "a = strides [96, 32, 2]: one of the two matrix axes must be contiguous (stride 1). Copy "
        "the array into a contiguous one.",
        lambda: bmm(normal(2, 3, 32)[:, :, :8:2], b),
    )
    refused(
        "a = strides [12, -4, 1]: must not be negative. Copy the array first.",
        lambda: bmm(a[:, ::-1], b),
    )
    refused(
        "out = a read-only array: is written to. Give a writable array.",
        lambda: bmm(a, b, out=frozen),
    )
    refused("alpha = 2: must be a real number. Pass a float.", lambda: bmm(a, b, alpha="2"))
    refused(
        "a_transposed = 1: must be True or False. Pass a bool.", lambda: bmm(a, b, a_transposed=1)
    )


def test_an_output_that_overlaps_an_input_is_refused() -> None:
    a = normal(2, 4, 4)
    with pytest.raises(
        InvalidValue, match=r"^out = 0x[0-9a-f]+: overlaps a\. Give the output memory"
    ):
        kernelseam.bmm(a, normal(2, 4, 4), out=a)
    shared = np.lib.stride_tricks.as_strided(normal(8, 4), (2, 4, 4), (0, 16, 4))
    with pytest.raises(InvalidValue) as caught:
        kernelseam.bmm(a, a, out=shared)
    assert str(caught.value) == (
        "out = batch stride 0: the 2 entries of this axis of out share elements (extents [2, 1, "
        "4, 4], strides [0, 16, 4, 1]). An output needs memory of its own for every element: make "
        "the batch stride of out larger."
    )
    near(kernelseam.bmm(a, a), a, a)


def test_refusals_of_a_transposed_out_name_the_arrays_as_given() -> None:
    """outᵀ = op(b)ᵀ·op(a)ᵀ is what is computed: A is b there, and B is a."""
    a, b = normal(2, 4, 4), normal(2, 4, 4)
    for x, name in ((a, "a"), (b, "b")):
        with pytest.raises(
            InvalidValue, match=rf"^out = 0x[0-9a-f]+: overlaps {name}\. Give the output memory"
        ):
            kernelseam.bmm(a, b, out=x.swapaxes(1, 2))


def test_a_transposed_out_where_heads_share_a_b() -> None:
    """outᵀ = op(b)ᵀ·op(a)ᵀ: b comes first there, and its heads and those that share them are two
    axes."""
    a, b, memory = normal(2, 4, 3, 2), normal(2, 2, 2, 5), normal(2, 4, 5, 3)
    kernelseam.bmm(a, b, out=memory.swapaxes(2, 3))
    near(memory.swapaxes(2, 3), a, np.repeat(b, 2, axis=1))
    apart = normal(3, 2, 2, 5)[::2]  # with the batch they are three: a list of addresses
    kernelseam.bmm(a, apart, out=memory.swapaxes(2, 3))
    near(memory.swapaxes(2, 3), a, np.repeat(apart, 2, axis=1))
