"""The kernel definition of the gradient by scores on Hopper: how elements that entries and heads
share are summed, where they go, and what of a step's pairs fits beside it. Nothing here needs a
GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from attention_problems import attention_problem
from hopper import H200, ROW, gradients
from kernelseam.descriptors.attention.backward_problem import AttentionBwdProblem
from kernelseam.dtypes import DType
from kernelseam_cuda import tensor_maps
from kernelseam_cuda.sm90.attention_bwd import HopperAttentionBwd
from kernelseam_cuda.sm90.attention_bwd_tiles import HopperBackwardTile
from kernelseam_cuda.sm90.attention_score_gradient import SCORE_GRADIENT, tile_of

KERNEL = HopperAttentionBwd()
F16, BF16, F32 = DType.float16, DType.bfloat16, DType.float32


def problem(
    kept: str = "-hij",
    S: int = 2048,
    batch: int = 4,
    heads: int = 16,
    bias: DType = BF16,
    dim: int = 128,
    mask: bool = False,
) -> AttentionBwdProblem:
    """``kept``: the axes along which the bias does not repeat."""
    p = attention_problem(
        S, S, heads, heads, batch, head_dim=dim, value_dim=dim, bias=bias, mask=mask
    )
    extents = [n if a in kept else 1 for a, n in zip("bhij", (batch, heads, S, S), strict=True)]
    strides, step = [0, 0, 0, 0], 1
    for axis in (3, 2, 1, 0):
        strides[axis] = step if extents[axis] > 1 else 0
        step *= extents[axis]
    b, h, i, j = strides
    forward = replace(p, bias_strides=(b, h, i, j), mask_strides=(0, 0, S, 1))
    return replace(gradients(forward, bias_gradient=True), dbias_strides=(b, h, i, j))


def narrow_tile(p: AttentionBwdProblem) -> HopperBackwardTile:
    tile = KERNEL.tile(p, ROW, H200)
    assert isinstance(tile, HopperBackwardTile)
    return tile


@pytest.mark.parametrize(
    ("kept", "S", "entries", "heads", "total", "launches"),
    [
        ("-hij", 2048, 4, 1, 16 * 128, 4),
        ("--ij", 2048, 4, 16, 128, 4),
        ("b-ij", 2048, 1, 16, 4 * 128, 4),
        ("bhij", 2048, 1, 1, 64 * 128, 4),
        # a row for all queries: its own sum is a launch behind
        ("-h-j", 2048, 4, 1, 16 * 128, 5),
        # so few tiles that each head keeps its own: they are summed behind
        ("--ij", 512, 4, 1, 16 * 8, 5),
        ("--ij", 128, 1, 1, 64, 5),
    ],
)
def test_entries_and_heads_are_summed_by_who_owns_an_element(
    kept: str, S: int, entries: int, heads: int, total: int, launches: int
) -> None:
    p = problem(kept, S)
    assert KERNEL.refuse(p, ROW) is None
    made = KERNEL.launches(p, KERNEL.tile(p, ROW, H200), H200)
    assert len(made.kernels) == launches
    scores = made.kernels[3]
    assert scores.kernel is SCORE_GRADIENT
    values = SCORE_GRADIENT.values(scores.problem, scores.tile, H200)
    assert (values["entries"], values["heads"], values["total"]) == (entries, heads, total)
    assert values["kept_heads"] * values["heads"] == 16
    cluster = scores.tile.cluster
    tiles = -(-S // (128 * cluster)) * (S // 128)
    assert values["total"] * values["entries"] * values["heads"] == 4 * 16 * tiles
    assert SCORE_GRADIENT.grid(p, scores.tile, H200) == cluster * min(total, 132 // cluster)
    config = SCORE_GRADIENT.config(p, scores.tile, ROW, H200)
    assert config.cluster == (cluster, 1, 1) and cluster == (1 if S <= 128 else 2)


def test_the_gradient_is_written_where_it_is_wanted_or_summed_behind() -> None:
    """Of a whole plane by its own strides; of a row as float32 of a plane, in the workspace."""
    p = problem("-hij", 1024)
    scores = KERNEL.launches(p, KERNEL.tile(p, ROW, H200), H200).kernels[3]
    assert "dbias" not in scores.workspace and scores.tile.dtype is BF16
    values = SCORE_GRADIENT.values(p, scores.tile, H200)
    assert [values[f"dbias_{a}"] for a in ("batch", "head", "row", "column")] == [
        *(0, 1024 * 1024, 1024, 1)
    ]
    row = problem("-h-j", 1024)
    made = KERNEL.launches(row, KERNEL.tile(row, ROW, H200), H200)
    scores, sums = made.kernels[3:]
    assert scores.tile.dtype is F32 and sums.kernel.entry == "sum_axes"
    assert scores.workspace["dbias"] == sums.workspace["x"]
    assert made.workspace_bytes == sums.workspace["x"] + 4 * 16 * 1024 * 1024
    assert sums.problem.extents == (1, 16, 1024, 1024)
    assert sums.problem.kept == (1, 16, 1, 1024)


def test_what_a_score_mod_returns_has_its_gradient_elsewhere() -> None:
    p = problem("-hij", 512)
    of_scores = replace(p, spec=replace(p.spec, bias_gradient=False, score_gradient=True))
    assert KERNEL.refuse(of_scores, ROW) == "the gradient by what a score_mod returns"


def test_a_bias_under_a_prefix_has_its_gradient_here_without_a_window() -> None:
    p = problem("-hij", 512)

    def refused(**options: bool) -> str | None:
        forward = replace(p.forward, spec=replace(p.forward.spec, prefix=True, **options))
        return KERNEL.refuse(
            replace(p, spec=replace(p.spec, forward=forward.spec), forward=forward), ROW
        )

    assert refused(causal=True) is None
    assert refused(window=True) == "the gradient of a bias under a prefix beside a window"


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("bias", [F16, BF16, F32])
@pytest.mark.parametrize("dim", [8, 64, 72, 96, 128])
def test_tiles_have_room_for_what_each_pair_has(dim: int, bias: DType, mask: bool) -> None:
    p = problem(bias=bias, dim=dim, mask=mask, S=256)
    assert KERNEL.refuse(p, ROW) is None
    tile = narrow_tile(p)
    assert tile.element_bytes == bias.itemsize + mask and min(tile.stages, tile.o_stages) >= 2
    assert tile.shared_bytes <= ROW.shared_bytes_per_block
    scores = tile_of(p, tile.step)
    assert scores.shared_bytes <= ROW.shared_bytes_per_block and scores.stages >= 2
    for name, m in SCORE_GRADIENT.tensor_maps(p, scores, H200).items():
        mine = 1 if name in ("q_map", "dout_map") else scores.cluster  # of keys the other's share
        assert tensor_maps.refuse(m, 16) is None and m.box == (64, 128 // mine, 1, 1)


def test_a_float32_bias_beside_a_mask_takes_the_next_wider_tile() -> None:
    """Of 128 queries a step there is no room for five bytes a pair."""
    narrow = narrow_tile(problem(bias=F32, dim=64))
    both = narrow_tile(problem(bias=F32, dim=64, mask=True))
    assert (narrow.step, narrow.stages, narrow.kv_stages) == (128, 2, 1)
    assert (both.step, both.head_dim) == (64, 96)
