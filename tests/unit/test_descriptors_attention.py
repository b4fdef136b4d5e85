"""Attention: what it derives from arrays and numbers, and what it refuses and how it says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attention_formula import attention as formula
from kernelseam import Attention, DType, plan
from kernelseam.descriptors import AttentionSpec
from kernelseam_thirdvendor import AcmeArray

Refused = Callable[[str, Callable[[], object]], None]
COUNT = "must be from 0 to 2**31 - 1. Give a count in that range."
ORDER = "Check the order of the axes of all arrays."
ROWS = "the last axis must be contiguous (stride 1). Copy the array into a contiguous one."
BASE: dict[str, Any] = {
    "batch": 2,
    "num_heads": 4,
    "S_q": 5,
    "S_k": 7,
    "head_dim": 8,
    "dtype": "float32",
}


def attention(**more: Any) -> Attention:
    return Attention(**{**BASE, **more})


def f32(*shape: int) -> np.ndarray[Any, Any]:
    return np.zeros(shape, np.float32)


def test_defaults() -> None:
    p = attention().problem()
    assert p.spec == AttentionSpec(DType.float32, 8, 8)
    assert (p.kv_heads, p.scale, p.lse_strides) == (4, 1 / np.sqrt(8), (0, 0))
    assert p.q_strides == p.out_strides == (160, 40, 8)
    assert p.k_strides == p.v_strides == (224, 56, 8)
    p = attention(kv_heads=2, value_dim=3, causal=True, return_lse=True, scale=2).problem()
    assert p.spec == AttentionSpec(DType.float32, 8, 3, True, True, 4)
    assert (p.v_strides, p.out_strides, p.lse_strides, p.scale) == (
        (42, 21, 3),
        (60, 15, 3),
        (20, 5),
        2.0,
    )
    assert [r.name for r in p.operands] == ["q", "k", "v", "out", "lse"]
    assert attention(head_dim=0).problem().scale == 1.0
    assert attention(lse=4096).problem().spec.lse


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_projection_without_a_copy(layout: str, causal: bool) -> None:
    """q, k and v lie in one buffer [B, S, H + 2·H_kv, D]; v's rows are cut to D_v columns."""
    rng = np.random.default_rng(3)
    qkv = rng.standard_normal((2, 6, 8, 16), np.float32)
    q, k, v = qkv[:, :, :4], qkv[:, :, 4:6], qkv[:, :, 6:, :12]
    out = np.full((2, 6, 4, 12), np.nan, np.float32)
    lse = np.full((2, 4, 6), np.nan, np.float32)
    given = (q, k, v, out) if layout == "bshd" else tuple(x.swapaxes(1, 2) for x in (q, k, v, out))
    d = Attention.from_arrays(*given, lse, causal=causal, layout=layout)
    p = d.problem()
    assert (p.batch, p.num_heads, p.kv_heads, p.S_q, p.S_k) == (2, 4, 2, 6, 6)
    assert p.spec == AttentionSpec(DType.float32, 16, 12, causal, True)
    assert p.q_strides == p.k_strides == p.v_strides == (6 * 8 * 16, 16, 8 * 16)
    assert p.out_strides == (6 * 4 * 12, 12, 4 * 12)
    plan(d).bind()()
    expected = formula(*(x.swapaxes(1, 2) for x in (q, k, v)), causal=causal)[0].swapaxes(1, 2)
    assert abs(out - expected).max() < 1e-5
    assert np.isfinite(lse).all()


def test_vector_class_is_that_of_the_worst_operand() -> None:
    assert attention(S_k=8).problem().spec.vector == 16
    assert attention(value_dim=6).problem().spec.vector == 4
    assert attention(k=4).problem().spec.vector == 4
    assert attention(k=4, S_k=0).problem().spec.vector == 16
    assert attention(dtype="float16", stride_v_batch=500).problem().spec.vector == 2
    assert attention(dtype="float16", stride_v_batch=500, batch=1).problem().spec.vector == 16


def test_empty_sequences() -> None:
    out, lse = np.full((1, 2, 3, 4), np.nan, np.float32), np.full((1, 2, 3), np.nan, np.float32)
    plan(
        Attention.from_arrays(f32(1, 2, 3, 4), f32(1, 2, 0, 4), f32(1, 2, 0, 4), out, lse)
    ).bind()()
    assert (out == 0).all() and (lse == -np.inf).all()
    plan(
        Attention.from_arrays(f32(1, 2, 0, 4), f32(1, 2, 3, 4), f32(1, 2, 3, 4), f32(1, 2, 0, 4))
    ).bind()()


def test_rebinding_arrays(refused: Refused) -> None:
    rng = np.random.default_rng(6)
    q, k, v = (rng.standard_normal((2, 4, 5, 8), np.float32) for _ in range(3))
    out, other = np.empty_like(q), np.empty_like(q)
    p = plan(Attention.from_arrays(q, k, v, out))
    p.bind()()
    p.bind(out=other, q=q * 2)()
    assert abs(out - formula(q, k, v)[0]).max() < 1e-5
    assert abs(other - formula(2 * q, k, v)[0]).max() < 1e-5
    p.bind(out=other.ctypes.data)()
    assert np.array_equal(out, other)
    refused(
        "q = an array of shape [2, 5, 4, 8] with strides [160, 32, 8, 1]: the plan is for shape "
        "[2, 4, 5, 8] with "
        "strides [160, 40, 8, 1]. Plan again with this array, or give its address.",
        lambda: p.bind(q=f32(2, 5, 4, 8)),
    )
    refused(
        "k = an array that spans 128 elements: the extents and strides walk over 320. "
        "Make them smaller, or give a larger array (or an address, where more memory follows).",
        lambda: p.bind(k=f32(1, 4, 4, 8)),
    )
    refused(
        "v = an array of float64: must be float32. Convert the array, or plan for its dtype.",
        lambda: p.bind(v=v.astype("f8")),
    )
    refused(
        "lse = given: is no operand of this plan. Its operands are q, k, v, out.",
        lambda: p.bind(lse=f32(2, 4, 5)),
    )


MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"batch": -2}, f"batch = -2: {COUNT}"),
    ({"num_heads": 1.0}, "num_heads = 1.0: must be an integer. Pass an int."),
    ({"kv_heads": False}, "kv_heads = False: must be an integer. Pass an int."),
    ({"S_q": 2**31}, f"S_q = 2147483648: {COUNT}"),
    ({"S_k": -1}, f"S_k = -1: {COUNT}"),
    ({"head_dim": -1}, f"head_dim = -1: {COUNT}"),
    ({"value_dim": "64"}, "value_dim = 64: must be an integer. Pass an int."),
    (
        {"kv_heads": 3},
        "num_heads = 4: must be a multiple of kv_heads = 3. Make num_heads a multiple of kv_heads.",
    ),
    (
        {"kv_heads": 0},
        "num_heads = 4: must be a multiple of kv_heads = 0. Make num_heads a multiple of kv_heads.",
    ),
    (
        {"batch": 2**20, "num_heads": 2**20, "S_q": 0, "S_k": 0},
        (
            "batch·num_heads = 1099511627776: must be from 0 to 2**31 - 1. Split the batch over "
            "several calls."
        ),
    ),
    (
        {"scale": float("nan")},
        "scale = nan: must be finite. Give a finite number, or None for the default.",
    ),
    (
        {"scale": float("inf")},
        "scale = inf: must be finite. Give a finite number, or None for the default.",
    ),
    ({"scale": "1"}, "scale = 1: must be a real number. Pass a float."),
    ({"causal": 1}, "causal = 1: must be True or False. Pass a bool."),
    ({"return_lse": None}, "return_lse = None: must be True or False. Pass a bool."),
    (
        {"dtype": None},
        (
            "dtype = None: must be named where q, k, v and out are no arrays. For example "
            "dtype='float16'."
        ),
    ),
    (
        {"dtype": "float8_e4m3fn"},
        (
            "dtype = float8_e4m3fn: must be one of float16, bfloat16, float32, float64. "
            "Convert the array or name one of these."
        ),
    ),
    (
        {"stride_k_row": -8},
        (
            "stride_k_row = -8: must be from 0 to 2**61 - 1. "
            "Strides count elements, from 0 (broadcast) upward."
        ),
    ),
    (
        {"S_q": 2**30, "stride_q_row": 2**33},
        (
            "q = [2, 4, 1073741824, 8] elements with strides [36893488147419103232, "
            "9223372036854775808, 8589934592, 1]: "
            "must take fewer than 2**63 bytes. Make the extents or the strides smaller."
        ),
    ),
    (
        {"stride_out_head": 0},
        (
            "stride_out_head = 0: the 4 entries of this axis of out share elements "
            "(extents [2, 4, 5, 8], strides [0, 0, 8, 1]). "
            "An output needs memory of its own for every element: make stride_out_head larger."
        ),
    ),
    (
        {"return_lse": True, "stride_lse_head": 4},
        (
            "stride_lse_head = 4: the 4 entries of this axis of lse share elements "
            "(extents [2, 4, 5], strides [16, 4, 1]). "
            "An output needs memory of its own for every element: make stride_lse_head larger."
        ),
    ),
    ({"q": -1}, "q = -1: must be from 0 to 2**64 - 1. Pass the memory's address."),
    (
        {"q": np.zeros((2, 4, 8, 5), np.float32).swapaxes(2, 3)},
        (
            "q = an array with strides [160, 40, 1, 5]: must be row-major without gaps where no "
            "strides are given. Give the strides, or copy the array."
        ),
    ),
]


@pytest.mark.parametrize(("more", "message"), MESSAGES)
def test_refused(more: dict[str, Any], message: str, refused: Refused) -> None:
    refused(message, lambda: attention(**more))


def frozen(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    x.flags.writeable = False
    return x


FROM_ARRAYS: list[tuple[dict[str, Any], str]] = [
    ({"q": f32(4, 5, 8)}, f"q = an array of shape [4, 5, 8]: must be [B, H, S_q, D]. {ORDER}"),
    (
        {"k": f32(3, 2, 7, 8)},
        f"k = an array of shape [3, 2, 7, 8]: must be [B=2, H_kv, S_k, D=8]. {ORDER}",
    ),
    (
        {"v": f32(2, 2, 6, 8)},
        f"v = an array of shape [2, 2, 6, 8]: must be [B=2, H_kv=2, S_k=7, D_v]. {ORDER}",
    ),
    (
        {"out": f32(2, 4, 5, 9)},
        f"out = an array of shape [2, 4, 5, 9]: must be [B=2, H=4, S_q=5, D_v=8]. {ORDER}",
    ),
    (
        {"lse": f32(2, 5, 4)},
        f"lse = an array of shape [2, 5, 4]: must be [B=2, H=4, S_q=5]. {ORDER}",
    ),
    ({"layout": "sbhd"}, "layout = sbhd: must be one of bhsd, bshd. Name the order of the axes."),
    ({"layout": None}, "layout = None: must be one of bhsd, bshd. Name the order of the axes."),
    (
        {"k": f32(2, 3, 7, 8), "v": f32(2, 3, 7, 8)},
        "num_heads = 4: must be a multiple of kv_heads = 3. Make num_heads a multiple of kv_heads.",
    ),
    (
        {"v": np.zeros((2, 2, 7, 8))},
        (
            "v = an array of float64: must be float32 as q is. Convert the array, or correct the "
            "dtype."
        ),
    ),
    (
        {"out": np.zeros((2, 4, 5, 8), np.float16)},
        "out = an array of float16: must be float32. Convert the array.",
    ),
    (
        {"k": f32(2, 2, 8, 7).swapaxes(2, 3)},
        f"k = strides [112, 56, 1, 7]: {ROWS}",
    ),
    (
        {"lse": f32(2, 5, 4).swapaxes(1, 2)},
        f"lse = strides [20, 1, 4]: {ROWS}",
    ),
    (
        {"q": f32(2, 4, 5, 8)[:, ::-1]},
        "q = strides (160, -40, 8, 1): must not be negative. Copy the array first.",
    ),
    (
        {"out": frozen(f32(2, 4, 5, 8))},
        "out = a read-only array: is written to. Give a writable array.",
    ),
    (
        {"out": np.lib.stride_tricks.as_strided(f32(2, 5, 8), (2, 4, 5, 8), (160, 0, 32, 4))},
        (
            "stride_out_head = 0: the 4 entries of this axis of out share elements "
            "(extents [2, 4, 5, 8], strides [40, 0, 8, 1]). "
            "An output needs memory of its own for every element: make stride_out_head larger."
        ),
    ),
    (
        {"q": None},
        (
            "q = builtins.NoneType: must be an array of a library and on a device known to acme, "
            "numpy. Pass a NumPy array, a torch tensor or anything with DLPack, and see "
            "`kernelseam doctor` for missing plugins."
        ),
    ),
    (
        {"v": AcmeArray(f32(2, 2, 7, 8))},
        "v = an array on acme:0 (acme1): q is on numpy:0 (cpu). Move all arrays to one device.",
    ),
]


@pytest.mark.parametrize(("more", "message"), FROM_ARRAYS)
def test_from_arrays_refuses(
    more: dict[str, Any], message: str, acme: Any, refused: Refused
) -> None:
    given: dict[str, Any] = {
        "q": f32(2, 4, 5, 8),
        "k": f32(2, 2, 7, 8),
        "v": f32(2, 2, 7, 8),
        "out": f32(2, 4, 5, 8),
    }
    refused(message, lambda: Attention.from_arrays(**{**given, **more}))


def test_overlap_is_refused_where_it_is_proven(refused: Refused) -> None:
    pool = f32(2, 5, 8, 8)  # [B, S, slot, D]
    q, k, v, out = (pool[:, :, i : i + 2].swapaxes(1, 2) for i in (0, 2, 4, 6))
    plan(Attention.from_arrays(q, k, v, out)).bind()()  # interleaved, no element shared
    shared = pool[:, :, 3:5].swapaxes(1, 2)
    refused(
        f"out = {hex(shared.ctypes.data)}: overlaps k. Give the output memory of its own.",
        lambda: plan(Attention.from_arrays(q, k, v, shared)).bind(),
    )
    big = f32(4096)
    lse = big[100:140].reshape(2, 4, 5)
    refused(
        f"out = {hex(big.ctypes.data)}: overlaps lse. Give the output memory of its own.",
        lambda: plan(
            Attention.from_arrays(
                f32(2, 4, 5, 8),
                f32(2, 4, 5, 8),
                f32(2, 4, 5, 8),
                big[:320].reshape(2, 4, 5, 8),
                lse,
            )
        ).bind(),
    )


def test_null_and_misaligned(refused: Refused) -> None:
    q, k, v, out = f32(2, 4, 5, 8), f32(2, 4, 7, 8), f32(2, 4, 7, 8), f32(2, 4, 5, 8)
    p = plan(attention(q=q, k=k, v=v, out=out))
    refused(
        "q = null: must be the address of memory on the device. Give q in the descriptor or to "
        "bind.",
        lambda: p.bind(q=0),
    )
    refused(
        "out = missing: must be the address of memory on the device. Give out in the descriptor "
        "or to bind.",
        lambda: p.bind(out=None),
    )
    refused(
        f"k = {hex(k.ctypes.data + 8)}: must be a multiple of 16 bytes. Align the array, or put "
        "its address into the "
        "descriptor before planning, so that a kernel without wide accesses is planned.",
        lambda: p.bind(k=k.ctypes.data + 8),
    )
    narrow = plan(attention(q=q, k=k.ctypes.data + 4, v=v, out=out))
    refused(
        f"k = {hex(k.ctypes.data + 6)}: must be a multiple of 4 bytes. Align the array.",
        lambda: narrow.bind(k=k.ctypes.data + 6),
    )
    refused(
        f"v = {hex(2**64 - 64)}: a walk over 448 elements leaves the 64-bit addresses. Pass the "
        "memory's address.",
        lambda: p.bind(v=2**64 - 64),
    )
