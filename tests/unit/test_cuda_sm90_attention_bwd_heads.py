"""Few KV heads with many query heads each in Hopper's gradients: which tiles share a group's heads
out, and what is launched then. Nothing here needs a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from attention_problems import attention_problem
from hopper import H200, ROW, gradients
from kernelseam.descriptors.attention.backward_problem import AttentionBwdProblem
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
        (problem(64, 4, 1), 1),  # three steps spared, and a launch more
        (problem(64, 7, 1), 7),
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
    rows, main, dq, sums = KERNEL.launches(p, tile, H200).kernels
    plain = KERNEL.launches(p, replace(tile, head_parts=1), H200)
    assert [k.kernel for k in plain.kernels] == [rows.kernel, main.kernel, dq.kernel]
    values = main.kernel.values(main.problem, main.tile, H200)
    assert [values[n] for n in ("kv_heads", "head_group", "head_parts")] == [16, 1, 8]
    maps = main.kernel.tensor_maps(main.problem, main.tile, H200)
    assert [maps[n].extents[2] for n in ("k_map", "v_map", "dk_map", "dv_map")] == [2, 2, 16, 16]
    end = plain.workspace_bytes
    for name, width in (("dk", 96), ("dv", 64)):
        assert main.workspace[name] == main.workspace[f"{name}_map"] == end
        assert sums.workspace[f"{name}_parts"] == end
        assert getattr(main.problem, f"{name}_strides") == (16 * 200 * width, 200 * width, width)
        end += -(-3 * 200 * 16 * width * 2 // 256) * 256
    assert KERNEL.launches(p, tile, H200).workspace_bytes == end
    values = sums.kernel.values(sums.problem, sums.tile, H200)
    assert [values[n] for n in ("batch", "kv_heads", "head_parts", "S_k")] == [3, 2, 8, 200]
    strides = [tuple(values[f"{n}_{a}"] for a in ("batch", "head", "row")) for n in ("dk", "dv")]
    assert strides == [p.dk_strides, p.dv_strides]
    # 20 times 16 bytes a row.
    assert sums.kernel.grid(sums.problem, sums.tile, H200) == -(-3 * 2 * 200 * 20 // 256)


def test_several_launches_of_staggered_tiles_only_where_these_are_two_steps_apart() -> None:
    """Of 128 queries a step, tiles of 128 keys follow each other closely."""
    together = {
        (dim, batch): tile_of(problem(1024, 16, 16, batch, head_dim=dim, value_dim=dim)).staggered
        for dim in (64, 128)
        for batch in (1, 4)
    }
    assert together == {(64, 1): 16, (64, 4): 0, (128, 1): 16, (128, 4): 16}
    assert tile_of(problem(1024, 16, 16, causal=True)).staggered == 0
    assert tile_of(problem(1024, 16, 16, batch_invariant=True)).staggered == 0
    assert tile_of(problem(128, 16, 16)).staggered == 0


def test_a_staggered_tile_is_for_heads_that_run_at_once() -> None:
    p = problem(1024, 16, 16, 4)
    tile = tile_of(p)
    assert tile.staggered * 8 == 128 and KERNEL.takes(p, tile, ROW, H200)
    values = KERNEL.values(p, tile, H200)
    assert (values["section"], values["section_tiles"]) == (16, 128)
    assert KERNEL.config(p, tile, ROW, H200).cooperative
    assert not KERNEL.config(p, replace(tile, staggered=0), ROW, H200).cooperative
    for other in (problem(1100, 16, 16, 4), problem(1024, 16, 16, 4, causal=True)):
        assert not KERNEL.takes(other, tile, ROW, H200)


@pytest.mark.parametrize(
    "p",
    [
        problem(1024, 16, 16, 4),
        problem(2064, 4, 4),
        problem(1024, 32, 8),
        problem(512, 8, 1, head_dim=256, value_dim=256),
        problem(768, 16, 2, head_dim=96, value_dim=96),
    ],
)
def test_no_block_has_two_staggered_tiles_of_a_section(p: AttentionBwdProblem) -> None:
    """Blocks have tiles in turn (producer.h): the first of two might wait for the second."""
    tile = tile_of(p)
    main = KERNEL.launches(p, tile, H200).kernels[1]
    values = main.kernel.values(main.problem, main.tile, H200)
    blocks = main.kernel.grid(main.problem, main.tile, H200) // tile.cluster
    assert tile.staggered and 0 < values["section_tiles"] <= blocks
