"""Few KV heads with many query heads each in Hopper's gradients: which tiles share a group's heads
out, and what is launched then. Nothing here needs a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from attention_problems import attention_problem
from hopper import H200, ROW, gradients
from kernelseam.descriptors.attention.backward_problem import AttentionBwdProblem
from kernelseam.kernels.attention.row_kernels import SumProblem
from kernelseam_cuda.sm90.attention_bwd import HopperAttentionBwd
from kernelseam_cuda.sm90.attention_bwd_cost import BackwardTile

KERNEL = HopperAttentionBwd()


def problem(
    S: int, heads: int, kv_heads: int, batch: int = 1, layout: str = "bhsd", **spec: Any
) -> AttentionBwdProblem:
    p = attention_problem(S, S, heads, kv_heads, batch, **spec)
    whole = gradients(p)
    if layout == "bhsd":
        dk, dv = ((kv_heads * S * d, S * d, d) for d in (p.spec.head_dim, p.spec.value_dim))
    else:
        dk, dv = ((S * kv_heads * d, d, kv_heads * d) for d in (p.spec.head_dim, p.spec.value_dim))
    return replace(whole, dk_strides=dk, dv_strides=dv)


def tile_of(p: AttentionBwdProblem) -> BackwardTile:
    return KERNEL.tile(p, ROW, H200)


@pytest.mark.parametrize(
    ("p", "parts"),
    [
        (problem(768, 16, 2, head_dim=96, value_dim=96), 8),  # 6 tiles of 2 heads
        (problem(768, 24, 2, batch=2), 4),  # 24 tiles, of which 96 run at once
        (problem(4096, 16, 2), 2),  # 64 tiles
        (problem(4096, 32, 4), 1),  # 128
        (problem(512, 8, 1, head_dim=256, value_dim=256), 8),  # 4 clusters of two blocks
        (problem(768, 16, 16), 1),
        (problem(4096, 32, 4, causal=True), 4),  # all 128 run at once, the longest twice the mean
        (problem(1024, 32, 8), 2),  # 64 tiles; in four parts two waves of as many steps
        (problem(1024, 32, 8, causal=True), 4),  # uneven tiles: 256 of them fill the device
        (problem(2048, 32, 4, causal=True), 4),
        (problem(1500, 16, 4, batch=2, causal=True), 4),
        (problem(64, 7, 1), 1),  # six steps spared, two launches more
        (problem(64, 8, 1), 8),
        (problem(768, 16, 2, batch_invariant=True), 1),
    ],
)
def test_heads_are_shared_out_where_that_takes_fewer_steps(
    p: AttentionBwdProblem, parts: int
) -> None:
    assert tile_of(p).head_parts == parts


def test_a_tile_says_in_how_many_parts_and_is_a_variant() -> None:
    p = problem(768, 16, 2, head_dim=96, value_dim=96)
    found = KERNEL.variants(p, ROW, H200)
    assert list(found) == [
        "128x64-3q-3dout-1kv-in-order-staggered-8head-parts",
        "128x64-3q-3dout-1kv-in-order",
    ]


def test_a_tile_is_for_groups_that_its_parts_divide_and_dense_rows() -> None:
    p = problem(768, 16, 2)
    shared = tile_of(p)
    assert shared.head_parts == 8 and KERNEL.takes(p, shared, ROW, H200)
    assert not KERNEL.takes(problem(768, 12, 2), shared, ROW, H200)  # groups of six
    packed = problem(768, 16, 2, q_view="packed", kv_view="packed")
    assert not KERNEL.takes(packed, shared, ROW, H200)
    assert not KERNEL.takes(problem(768, 16, 2, batch_invariant=True), shared, ROW, H200)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_gradients_of_parts_lie_in_the_workspace_and_are_added_up(layout: str) -> None:
    p = problem(200, 16, 2, batch=3, layout=layout, head_dim=96, value_dim=64)
    tile = tile_of(p)
    assert tile.head_parts == 8
    rows, main, dq, *sums = KERNEL.launches(p, tile, H200).kernels
    plain = KERNEL.launches(p, replace(tile, head_parts=1), H200)
    assert [k.kernel for k in plain.kernels] == [rows.kernel, main.kernel, dq.kernel]
    values = main.kernel.values(main.problem, main.tile, H200)
    assert [values[n] for n in ("kv_heads", "head_group", "head_parts")] == [16, 1, 8]
    maps = main.kernel.tensor_maps(main.problem, main.tile, H200)
    assert [maps[n].extents[2] for n in ("k_map", "v_map", "dk_map", "dv_map")] == [2, 2, 16, 16]
    end = plain.workspace_bytes
    for launch, name, width in zip(sums, ("dk", "dv"), (96, 64), strict=True):
        assert main.workspace[name] == main.workspace[f"{name}_map"] == end
        assert (launch.workspace, launch.operands) == ({"x": end}, {"out": name})
        end += -(-3 * 200 * 16 * width * 2 // 256) * 256
    assert KERNEL.launches(p, tile, H200).workspace_bytes == end


def added_up(s: SumProblem, x: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
    """What sum_axes.h does."""
    for at in product(*map(range, s.extents)):
        to = sum(i * d for i, d in zip(at, s.out_strides, strict=True))
        out[to] += x[sum(i * d for i, d in zip(at, s.x_strides, strict=True))]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_head_gets_the_sum_of_its_parts(layout: str) -> None:
    p = problem(5, 8, 2, batch=3, layout=layout, head_dim=8, value_dim=8)
    tile = replace(tile_of(p), head_parts=4)
    _, main, _, dk, _ = KERNEL.launches(p, tile, H200).kernels
    parts = np.random.default_rng(3).standard_normal((3, 8, 5, 8))
    x, out = np.zeros(parts.size), np.zeros(3 * 2 * 5 * 8)
    entry, head, row = main.problem.dk_strides
    for b, h, s, d in np.ndindex(parts.shape):
        x[b * entry + h * head + s * row + d] = parts[b, h, s, d]
    added_up(dk.problem, x, out)
    shape = (3, 2, 5, 8) if layout == "bhsd" else (3, 5, 2, 8)
    found = out.reshape(shape) if layout == "bhsd" else out.reshape(shape).swapaxes(1, 2)
    np.testing.assert_allclose(found, parts.reshape(3, 2, 4, 5, 8).sum(2), rtol=1e-12)
