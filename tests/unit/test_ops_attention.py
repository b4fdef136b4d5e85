"""attention on host arrays of any strides, and what it refuses; tests/parity/test_arrays.py has its
dtypes."""

from __future__ import annotations

from typing import Any

import kernelseam
import numpy as np
import pytest
from attention_formula import attention, close
from kernelseam.errors import InvalidValue
from refusals import Refused

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(21)


def normal(*shape: int, dtype: Any = np.float32) -> Array:
    return RNG.standard_normal(shape).astype(dtype)


def test_packed_projections_are_walked_without_a_copy() -> None:
    qkv = normal(2, 33, 3, 4, 16, dtype=np.float16)  # [B, S, (q, k, v), H, D]
    q, k, v = (qkv[:, :, i] for i in range(3))
    out = np.full((2, 33, 8, 16), np.nan, np.float16)
    y = kernelseam.attention(q, k, v, causal=True, layout="bshd", out=out[:, :, ::2])
    assert np.shares_memory(y, out) and np.isnan(out[:, :, 1::2]).all()
    heads_first = [x.swapaxes(1, 2) for x in (q, k, v)]
    close(y.swapaxes(1, 2), attention(*heads_first, causal=True)[0])
    np.testing.assert_array_equal(y.swapaxes(1, 2), kernelseam.attention(*heads_first, causal=True))


def test_stride_0_and_gaps() -> None:
    k = np.broadcast_to(normal(1, 1, 50, 16), (3, 2, 50, 16))
    v = normal(3, 2, 100, 64)[:, :, ::2, 8:24]
    one_key = np.broadcast_to(normal(3, 2, 1, 16), (3, 2, 50, 16))
    q = normal(3, 2, 20, 32)[:, :, :, :16]
    for keys, causal in ((k, False), (one_key, True)):
        y, lse = kernelseam.attention(q, keys, v, causal=causal, return_lse=True)
        for actual, expected in zip((y, lse), attention(q, keys, v, causal=causal), strict=True):
            close(actual, expected)


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
