"""Projections on the host platform: one launch a product whatever the extents, and what an
attention makes of them."""

from __future__ import annotations

from typing import Any

import kernelseam
import numpy as np
import pytest
from kernelseam.plugins import Plugins
from kernelseam_hostcpp import HostArray

RNG = np.random.default_rng(0)
H, G, D, HIDDEN = 4, 2, 16, 40
WIDTH = (H + 2 * G) * D


def normal(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float16)


def here(*arrays: Any) -> list[Any]:
    return [HostArray(x) for x in arrays]


def launched(work: Any) -> tuple[Any, list[str]]:
    with kernelseam.trace() as launches:
        made = work()
    assert all(r.kind == "kernel" for r in launches)
    return made, [r.kernel for r in launches]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(("batch", "S"), [(1, 1), (3, 40), (17, 3)])
def test_one_launch_a_product_whatever_the_extents(
    hostcpp: Plugins, batch: int, S: int, layout: str
) -> None:
    x, w, bias = here(normal(batch, S, HIDDEN), normal(WIDTH, HIDDEN), normal(WIDTH))
    (q, k, v), kernels = launched(
        lambda: kernelseam.fused_qkv_projection(x, w, bias, H, G, D, layout=layout)
    )
    assert kernels == ["gemm"]
    w_out, b_out = here(normal(HIDDEN, H * D), normal(HIDDEN))
    y, kernels = launched(
        lambda: kernelseam.fused_output_projection_residual(q, w_out, b_out, x, layout=layout)
    )
    assert kernels == ["gemm"] and y.host.shape == (batch, S, HIDDEN)
    _, kernels = launched(
        lambda: kernelseam.fused_qkv_projection_bwd(q, k, v, x, w, True, H, G, D, layout=layout)
    )
    assert kernels == ["gemm", "gemm"]
    back, kernels = launched(
        lambda: kernelseam.fused_output_projection_residual_bwd(y, q, w_out, True, layout=layout)
    )
    assert kernels == ["gemm", "gemm"] and back.d_residual is y
    _, kernels = launched(
        lambda: kernelseam.fused_qkv_projection_bwd(
            q,
            k,
            v,
            None,
            None,
            True,
            H,
            G,
            D,
            layout=layout,
            input_gradient=False,
            weight_gradient=False,
        )
    )
    assert kernels == ["gemm"]


def test_no_tokens_launch_nothing_forward_and_zeros_backward(hostcpp: Plugins) -> None:
    x, w = here(normal(2, 0, HIDDEN), normal(WIDTH, HIDDEN))
    (q, k, v), kernels = launched(lambda: kernelseam.fused_qkv_projection(x, w, None, H, G, D))
    assert kernels == []
    made, kernels = launched(
        lambda: kernelseam.fused_qkv_projection_bwd(q, k, v, x, w, True, H, G, D)
    )
    assert kernels == ["gemm"] and not made.d_weight.host.any() and not made.d_bias.host.any()


def test_packed_rows_go_to_the_pages_of_their_sequences(hostcpp: Plugins) -> None:
    """Sequences of 5 and 9 tokens, written by pages of 4 and read by a paged attention: as without
    pages."""
    lengths, size = (5, 9), 4
    x, w = normal(sum(lengths), HIDDEN), normal(WIDTH, HIDDEN)
    angle = RNG.standard_normal((max(lengths), D // 2)).astype(np.float32)
    tables = here(np.cos(angle), np.sin(angle))
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    offsets = np.cumsum([0, *lengths]).astype(np.int32)
    packed, weight, at, ends = here(x, w, positions, offsets)
    q, k, v = kernelseam.fused_qkv_projection(
        packed, weight, None, H, G, D, layout="bshd", rotary=tables, positions=at
    )
    want = kernelseam.attention_varlen(q, k, v, ends, ends, 9, 9, causal=True)
    table = np.array([[4, 1, 0], [5, 3, 2]], np.int32)
    pages = here(*(np.full((6, size, G, D), np.nan, np.float16) for _ in "kv"))
    its_table, keys = here(table, np.array(lengths, np.int32))
    paged, kernels = launched(
        lambda: kernelseam.fused_qkv_projection(
            packed,
            weight,
            None,
            H,
            G,
            D,
            layout="bshd",
            rotary=tables,
            positions=at,
            k_pages=pages[0],
            v_pages=pages[1],
            block_table=its_table,
            cu_seqlens_q=ends,
        )
    )
    assert kernels == ["gemm", "paged_cache"]
    np.testing.assert_array_equal(paged.host, q.host)
    found = kernelseam.attention_paged(
        paged, *pages, its_table, keys, cu_seqlens_q=ends, max_seqlen_q=9
    )
    np.testing.assert_array_equal(found.host, want.host)
