"""The projections and their gradients on host arrays and torch's CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernelseam
import numpy as np
import pytest
from kernelseam.errors import InvalidValue
from refusals import Refused

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(78)
B, S, HIDDEN, H, G, D = 2, 7, 24, 4, 2, 8
WIDTH = (H + 2 * G) * D


def normal(*shape: int, dtype: Any = np.float32) -> Array:
    return RNG.standard_normal(shape).astype(dtype)


def close(got: Array, want: Array, limit: float = 1e-5) -> None:
    assert got.shape == want.shape
    error = np.abs(got.astype(np.float64) - want).max() / max(np.abs(want).max(), 1e-30)
    assert error <= limit, error


def heads_of(
    x: Array, weight: Array, bias: Array | None, layout: str
) -> tuple[Array, Array, Array]:
    """q, k and v in float64."""
    y = x.astype(np.float64) @ weight.T.astype(np.float64) + (
        0 if bias is None else bias.astype(np.float64)
    )
    y = y.reshape(*x.shape[:-1], H + 2 * G, D)
    if layout == "bhsd":
        y = y.swapaxes(-2, -3)
    axis = y.ndim - (3 if layout == "bhsd" else 2)
    q, k, v = np.split(y, [H, H + G], axis)
    return q, k, v


def tables(rows: int, half: int) -> tuple[Array, Array]:
    at = np.arange(rows)[:, None] / 10.0 ** np.arange(half)
    return np.cos(at).astype(np.float32), np.sin(at).astype(np.float32)


# ---------------------------------------------------------------- q, k and v


@pytest.mark.parametrize("kv_layout", ["nhd", "hnd"])
def test_k_and_v_go_into_pages(kv_layout: str) -> None:
    x, weight, size = normal(B, S, HIDDEN), normal(WIDTH, HIDDEN), 3
    shape = (9, size, G, D) if kv_layout == "nhd" else (9, G, size, D)
    k_pages, v_pages = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    table = np.array([[8, 2, 5, 0], [1, 7, 3, 0]], np.int32)
    with kernelseam.trace() as launches:
        q = kernelseam.fused_qkv_projection(
            x,
            weight,
            None,
            H,
            G,
            D,
            layout="bshd",
            k_pages=k_pages,
            v_pages=v_pages,
            block_table=table,
            kv_layout=kv_layout,
            first_position=2,
        )
    assert len(launches) == 1
    wanted = kernelseam.fused_qkv_projection(x, weight, None, H, G, D, layout="bshd")
    np.testing.assert_array_equal(q, wanted[0])
    for pages, want in zip((k_pages, v_pages), wanted[1:], strict=True):
        rows = pages if kv_layout == "nhd" else pages.swapaxes(1, 2)
        found = rows[table[:, :3]].reshape(B, 3 * size, G, D)
        np.testing.assert_array_equal(found[:, 2:], want)
        assert np.isnan(found[:, :2]).all() and np.isnan(rows[[0, 4, 6]]).all(), (
            "nothing else is written"
        )


def test_results_in_arrays_of_one_s_own() -> None:
    x, weight = normal(B, S, HIDDEN, dtype=np.float16), normal(WIDTH, HIDDEN, dtype=np.float16)
    packed = np.full((B, S, H + 2 * G, D), np.nan, np.float32)
    out = (packed[:, :, :H], packed[:, :, H : H + G], packed[:, :, H + G :])
    assert kernelseam.fused_qkv_projection(x, weight, None, H, G, layout="bshd", out=out) is out
    wanted = kernelseam.fused_qkv_projection(
        x, weight, None, H, G, layout="bshd", out_dtype="float32"
    )
    for got, want in zip(out, wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    q = np.empty((B, S, H, D), np.float16)
    pages = [np.zeros((B, S, G, D), np.float16) for _ in "kv"]
    table = np.arange(B, dtype=np.int32)[:, None]
    assert (
        kernelseam.fused_qkv_projection(
            x,
            weight,
            None,
            H,
            G,
            layout="bshd",
            out=q,
            k_pages=pages[0],
            v_pages=pages[1],
            block_table=table,
        )
        is q
    )
    np.testing.assert_array_equal(q, wanted[0].astype(np.float16))
    np.testing.assert_array_equal(pages[1], wanted[2].astype(np.float16))


def test_nothing_is_copied_whatever_the_strides() -> None:
    whole, rows = normal(S, B, 2, HIDDEN), normal(WIDTH, 2 * HIDDEN)
    x, weight = whole[:, :, 1].swapaxes(0, 1), rows[:, HIDDEN:]
    for got, want in zip(
        kernelseam.fused_qkv_projection(x, weight, None, H, G),
        heads_of(x, weight, None, "bhsd"),
        strict=True,
    ):
        close(got, want)
    empty = kernelseam.fused_qkv_projection(x[:0], weight, None, H, G)
    assert [y.shape for y in empty] == [(0, H, S, D), (0, G, S, D), (0, G, S, D)]


# ---------------------------------------------------------------- the output


def test_a_residual_may_repeat_and_be_wider() -> None:
    attn_out, weight = (
        normal(B, S, H * D, dtype=np.float16),
        normal(HIDDEN, H * D, dtype=np.float16),
    )
    row = normal(HIDDEN)
    got = kernelseam.fused_output_projection_residual(
        attn_out, weight, None, np.broadcast_to(row, (B, S, HIDDEN)), out_dtype="float32"
    )
    same = kernelseam.fused_output_projection_residual(attn_out, weight, row, out_dtype="float32")
    np.testing.assert_array_equal(got, same)


# ---------------------------------------------------------------- gradients


def test_gradients_that_are_not_requested() -> None:
    x, weight = normal(B, S, HIDDEN), normal(WIDTH, HIDDEN)
    d = normal(B, H, S, D), normal(B, G, S, D), normal(B, G, S, D)
    all_of_them = kernelseam.fused_qkv_projection_bwd(*d, x, weight, True, H, G, D)
    found = kernelseam.fused_qkv_projection_bwd(
        *d, None, weight, False, H, G, D, weight_gradient=False
    )
    assert found[1:] == (None, None)
    np.testing.assert_array_equal(found.d_input, all_of_them.d_input)
    found = kernelseam.fused_qkv_projection_bwd(*d, x, None, True, H, G, D, input_gradient=False)
    assert found.d_input is None
    np.testing.assert_array_equal(found.d_weight, all_of_them.d_weight)
    found = kernelseam.fused_qkv_projection_bwd(
        *d, None, None, True, H, G, D, input_gradient=False, weight_gradient=False
    )
    assert found[:2] == (None, None)
    np.testing.assert_array_equal(found.d_bias, all_of_them.d_bias)
    d_output, attn_out, w = normal(B, S, HIDDEN), normal(B, H, S, D), normal(HIDDEN, H * D)
    found_output = kernelseam.fused_output_projection_residual_bwd(
        d_output, attn_out, None, False, input_gradient=False
    )
    assert found_output.d_attn_out is None and found_output.d_bias is None
    alone = kernelseam.fused_output_projection_residual_bwd(
        d_output, attn_out, w, False, weight_gradient=False
    )
    assert alone.d_weight is None and alone.d_attn_out.shape == attn_out.shape


# ---------------------------------------------------------------- torch, plans, refusals


def test_the_plan_is_remembered_for_the_options_too() -> None:
    x, weight = normal(B, S, HIDDEN), normal(WIDTH, HIDDEN)
    cos, sin = tables(20, 4)
    first = kernelseam.fused_qkv_projection(x, weight, None, H, G, rotary=(cos, sin))
    other = kernelseam.fused_qkv_projection(
        x, weight, None, H, G, rotary=(cos, sin), rotary_style="pairs"
    )
    later = kernelseam.fused_qkv_projection(
        x, weight, None, H, G, rotary=(cos, sin), first_position=1
    )
    again = kernelseam.fused_qkv_projection(x, weight, None, H, G, rotary=(cos, sin))
    np.testing.assert_array_equal(first[0], again[0])
    for different in (other, later):
        assert abs(first[0] - different[0]).max() > 0.01
        np.testing.assert_array_equal(first[2], different[2])
    fewer = kernelseam.fused_qkv_projection(x, weight, None, 2, 3, D)
    assert [y.shape[1] for y in fewer] == [2, 3, 3]


def test_refusals_of_q_k_and_v(refused: Refused) -> None:
    x, weight = normal(B, S, HIDDEN), normal(WIDTH, HIDDEN)
    cos, sin = tables(20, 4)

    def call(*given: Any, **more: Any) -> Callable[[], object]:
        return lambda: kernelseam.fused_qkv_projection(
            *(given or (x, weight, None, H, G, D)), **more
        )

    refused("num_heads = None: must be the number of query heads. Give it.", call(x, weight))
    refused(
        "weight = an array of 64 rows: must have (num_heads + 2·num_kv_heads)·head_dim rows, 8·9. "
        "Check the numbers of heads and head_dim.",
        call(x, weight, None, H, G, 9),
    )
    refused(
        "weight = an array of 64 rows: must have (num_heads + 2·num_kv_heads)·head_dim rows, "
        "12·head_dim. Check the numbers of heads and head_dim.",
        call(x, weight, None, H),
    )
    refused(
        "weight = an array of shape [24]: must have 2 axes, [columns, hidden]. Add or remove "
        "axes with reshape.",
        call(x, weight[0], None, H, G),
    )
    refused("rotary = ndarray: must be (cosines, sines). Pass two arrays.", call(rotary=cos))
    refused(
        "rotary[1] = None: must be an array. Give cosines and sines, or leave rotary out.",
        call(rotary=(cos, None)),
    )
    refused(
        "rotary[0] = an array of float64: must be float32. Convert the array, or plan for its "
        "dtype.",
        call(rotary=(cos.astype(float), sin)),
    )
    refused(
        "rotary_style = pairs: has no effect without rotary. Give rotary, or leave it out.",
        call(rotary_style="pairs"),
    )
    refused(
        "kv_layout = hnd: is the order of a page's axes. Give pages, or leave it out.",
        call(kv_layout="hnd"),
    )
    refused(
        "first_position = 14: the last of S = 7 tokens is at 20, beyond rotary's rows = 20. Give "
        "longer tables, or correct it.",
        call(rotary=(cos, sin), first_position=14),
    )
    refused(
        "first_position = 3: nothing asks for it. Give rotary, or block_table, or leave it out.",
        call(first_position=3),
    )
    refused(
        "v_pages = None: is used with k_pages. Give all three, or none.",
        call(k_pages=normal(3, 4, G, D)),
    )
    refused(
        "block_table = None: is used with k_pages and v_pages. Give all three, or none.",
        call(k_pages=normal(3, 4, G, D), v_pages=normal(3, 4, G, D)),
    )
    refused("out = ndarray: must be (q, k, v). Pass three arrays.", call(out=x))
    pages = {"k_pages": normal(3, 4, G, D), "v_pages": normal(3, 4, G, D)}
    table = np.array([[0, 1], [2, 3]], np.int32)
    refused(
        "out = tuple: must be the array of q where k and v go to pages. Pass it.",
        call(**pages, block_table=table, out=(x,)),
    )
    refused(
        "out_dtype = float32: out[0] is an array of float16. Give one of the two.",
        call(out=tuple(np.zeros((B, n, S, D), np.float16) for n in (H, G, G)), out_dtype="float32"),
    )
    refused(
        "num_heads = 4: the array of out[0] has 2. Give one of the two.",
        call(out=tuple(np.zeros((B, n, S, D), np.float32) for n in (2, 3, 3))),
    )
    refused(
        "num_kv_heads = 2: the array of k_pages has 3. Give one of the two.",
        call(
            k_pages=normal(3, 4, 3, D),
            v_pages=normal(3, 4, 3, D),
            block_table=np.zeros((B, 2), np.int32),
        ),
    )
    q = np.zeros((B, H, S, D), np.float32)
    with pytest.raises(
        InvalidValue,
        match=r"^out\[0\] = 0x[0-9a-f]+: overlaps out\[1\]\. Give the output "
        r"memory of its own\.$",
    ):
        call(out=(q, q[:, :G], np.zeros((B, G, S, D), np.float32)))()


def test_refusals_of_the_output(refused: Refused) -> None:
    attn_out, weight, residual = normal(B, S, H * D), normal(HIDDEN, H * D), normal(B, S, HIDDEN)

    def call(*given: Any, **more: Any) -> Callable[[], object]:
        return lambda: kernelseam.fused_output_projection_residual(
            *(given or (attn_out, weight)), **more
        )

    refused(
        "attn_out = an array of shape [32]: must have 4 axes, [B, H, S, D]. Add or remove axes "
        "with reshape.",
        call(attn_out[0, 0], weight),
    )
    refused(
        "out_dtype = float16: out is an array of float32. Give one of the two.",
        call(out=residual, out_dtype="float16"),
    )
    with pytest.raises(
        InvalidValue, match=r"^out = 0x[0-9a-f]+: overlaps residual\. Give the output memory of"
    ):
        whole = normal(B, S + 1, HIDDEN)
        call(attn_out, weight, None, whole[:, :S], out=whole[:, 1:])()


def test_refusals_of_gradients(refused: Refused) -> None:
    x, weight = normal(B, S, HIDDEN), normal(WIDTH, HIDDEN)
    d = normal(B, H, S, D), normal(B, G, S, D), normal(B, G, S, D)

    def call(*given: Any, **more: Any) -> Callable[[], object]:
        return lambda: kernelseam.fused_qkv_projection_bwd(*given, **more)

    refused("has_bias = 1: must be True or False. Pass a bool.", call(*d, x, weight, 1, H, G, D))
    refused(
        "input_gradient = False: no gradient is requested. Leave the call out.",
        call(*d, None, None, False, H, G, D, input_gradient=False, weight_gradient=False),
    )
    refused(
        "bias_dtype = float32: describes d_bias. Say has_bias=True, or leave it out.",
        call(*d, x, weight, False, H, G, D, bias_dtype="float32"),
    )
    refused(
        "num_heads = 2: dq has 4. Check the order of the axes.", call(*d, x, weight, True, 2, 3, D)
    )
    refused(
        "input = an array of shape [2, 24, 7]: must be [B=2, S=7, hidden]. Check the order of the "
        "axes of all arrays.",
        call(*d, x.swapaxes(1, 2), None, True, H, G, D, input_gradient=False),
    )
