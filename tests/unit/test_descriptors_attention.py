"""Attention: what it derives from arrays and numbers, and what it refuses and how it says so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention_formula import attention as formula
from kernelseam import Attention, DType, plan
from kernelseam.descriptors import AttentionSpec
from kernelseam_thirdvendor import AcmeArray  # noqa: F401  for refusals
from refusals import Refused, refusals

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


MESSAGES: list[tuple[dict[str, Any], str]] = refusals("attention", "fields", globals())


@pytest.mark.parametrize(("more", "message"), MESSAGES)
def test_refused(more: dict[str, Any], message: str, refused: Refused) -> None:
    refused(message, lambda: attention(**more))


def frozen(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    x.flags.writeable = False
    return x


FROM_ARRAYS: list[tuple[dict[str, Any], str]] = refusals("attention", "arrays", globals())


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
