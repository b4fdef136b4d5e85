"""The kernel definition of Hopper's latent attention: what it takes, what it is launched with.
Nothing here needs a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hopper import H200, ROW
from kernelseam.absent import product
from kernelseam.descriptors.attention.problem import AttentionProblem, AttentionSpec
from kernelseam.dispatch import select
from kernelseam.dtypes import DType
from kernelseam.kernels.attention.ragged import EVEN_UNKNOWN, typical
from kernelseam_cuda.sm90.latent import MERGE, HopperLatent
from kernelseam_cuda.sm90.latent_tiles import (
    CLUSTER_LATENT_REGISTERS,
    FEW_SCALED_LATENT_REGISTERS,
    LATENT,
    SCALED_LATENT_REGISTERS,
    HopperLatentTile,
)

KERNEL = HopperLatent()
FEW, PAIR, TILE = LATENT


def problem(
    S_q: int = 1,
    S_k: int = 4096,
    heads: int = 128,
    batch: int = 64,
    total_q: int = 0,
    **spec: object,
) -> AttentionProblem:
    """Pages of 64 rows. ``total_q``: queries are packed."""
    options = {
        "dtype": DType.bfloat16,
        "head_dim": 576,
        "value_dim": 512,
        "kv_view": "paged",
        "lengths": True,
        "latent": True,
        "q_view": "packed" if total_q else "strided",
    }
    s = AttentionSpec(**{**options, **spec})  # type: ignore[arg-type]
    rows = (64 * 576, 576, 576)
    return AttentionProblem(
        s,
        batch,
        heads,
        1,
        S_q,
        S_k,
        (S_q * heads * 576, 576, heads * 576),
        rows,
        rows,
        (S_q * heads * 512, 512, heads * 512),
        scale=0.1,
        total_q=total_q,
        pages=batch * -(-S_k // 64),
        page_size=64,
        table_width=-(-S_k // 64),
        table_stride=-(-S_k // 64),
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"latent": False}, "it takes values that are the first columns of the keys: latent"),
        ({"dtype": DType.float32}, "it takes bfloat16 and float16, not float32"),
        ({"dtype_out": DType.float32}, "dtype_out is not supported by this kernel"),
        ({"batch_invariant": True}, "batch_invariant is not supported by this kernel"),
        ({"head_dim": 512}, "head dims 512: it takes 576/512"),
        (
            {"kv_view": "packed"},
            "queries strided with keys packed: it takes both strided or both packed",
        ),
        ({"q_view": "pointers"}, "queries by a list of pointers"),
        (
            {"kv_view": "pointers"},
            "queries strided with keys pointers: it takes both strided or both packed",
        ),
        ({"vector": 2}, "rows at multiples of 2 bytes: it copies 16 bytes at a time"),
        (
            {"S_q": 2**22, "S_k": 2**22},
            "(S_q + S_k)·heads of a group = 1073741824: it takes less than 2^30",
        ),
        ({"S_q": 0}, "there are no queries"),
        ({"batch": 2**20, "S_k": 2**20}, "17181966336 tiles of keys: it takes less than 2^31"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_by_name(
    changes: dict[str, object], reason: str
) -> None:
    assert KERNEL.refuse(problem(**changes), ROW) == reason  # type: ignore[arg-type]


SCALED = {"dtype_kv": DType.float8_e4m3fn, "row_scale_block": 128}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"dtype_kv": DType.float8_e4m3fn},
            "dtype_kv is not supported by this kernel",
        ),
        (
            {**SCALED, "row_scale_block": 64},
            "row_scale_block = 64: it takes 128",
        ),
        ({**SCALED, "kv_scales": "heads"}, "kv_scales is not supported by this kernel"),
    ],
)
def test_keys_of_8_bits_have_flashmlas_rows(changes: dict[str, object], reason: str) -> None:
    assert KERNEL.refuse(problem(**changes), ROW) == reason  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("S_q", "heads", "rows"), [(1, 16, 16), (1, 3, 16), (2, 8, 16), (1, 17, 64), (2, 16, 64)]
)
def test_few_rows_have_a_tile_of_their_own(S_q: int, heads: int, rows: int) -> None:
    p = problem(S_q=S_q, heads=heads)
    for kernel in (KERNEL, MERGE):
        assert kernel.tile(p, ROW, H200).rows == rows
    tile = KERNEL.tile(p, ROW, H200)
    assert KERNEL.constants(p.spec, tile, ROW)["ROWS"] == rows
    assert KERNEL.launches(p, tile, H200).workspace_bytes == 2 * 132 * rows * 513 * 4
    assert list(KERNEL.variants(p, ROW, H200)) == ["16x64"] * (rows == 16) + ["64x64"]


def test_scaled_rows_come_as_they_lie_or_are_converted_by_the_warps_that_load_them() -> None:
    p = problem(heads=16, **SCALED)
    assert KERNEL.refuse(p, ROW) is None and KERNEL.tile(p, ROW, H200) == FEW
    for tile, registers in (
        (TILE, SCALED_LATENT_REGISTERS),
        (PAIR, CLUSTER_LATENT_REGISTERS),
        (FEW, FEW_SCALED_LATENT_REGISTERS),
    ):
        found = KERNEL.constants(p.spec, tile, ROW)
        assert (found["KV"], found["ROW_SCALES"]) == ("e4m3", 128)
        assert found["CLUSTER"] == tile.cluster
        names = (f"{n}_REGISTERS" for n in ("PRODUCER", "CONSUMER", "COLUMN"))
        assert tuple(found[n] for n in names) == registers
    assert KERNEL.tensor_maps(p, TILE, H200)["k_map"].dtype is DType.float8_e4m3fn
    # measured: about a copy of so many bytes; 128 heads 0.73 of those of 16 bits
    few, pair, plain = (
        KERNEL.work(problem(heads=n, **kind), tile, H200)  # type: ignore[arg-type]
        for n, kind, tile in ((16, SCALED, FEW), (128, SCALED, PAIR), (128, {}, TILE))
    )
    assert few.bytes == typical(p, EVEN_UNKNOWN).bytes_moved and few.rate == FEW.rate
    assert pair.rate == 0.73 * plain.rate
    constants = KERNEL.constants(problem().spec, TILE, ROW)
    assert (constants["KV"], constants["ROW_SCALES"]) == ("bf16", 0)


@pytest.mark.parametrize(
    ("changes", "page", "tile", "boxes"),
    [
        (SCALED, 64, FEW, 1),  # rows of a tile lie together
        (SCALED, 128, FEW, 1),
        (SCALED, 48, FEW, 1),  # and those of a page that ends within it
        (SCALED, 4, FEW, 1),
        (SCALED, 3, FEW, 0),  # few rows come one by one
        (SCALED, 1, FEW, 0),
        (SCALED, 64, TILE, 0),  # TMA brings no tile that has to be converted
        ({}, 64, FEW, 0),  # and no tile of few rows
        ({}, 64, TILE, 1),
    ],
)
def test_what_comes_at_once(
    changes: dict[str, object], page: int, tile: HopperLatentTile, boxes: int
) -> None:
    p = replace(problem(heads=16, **changes), page_size=page)  # type: ignore[arg-type]
    width = p.spec.key_width
    p = replace(p, k_strides=(page * width, width, width))
    assert KERNEL.values(p, tile, H200)["boxes"] == boxes
    apart = replace(p, k_strides=(2 * page * width, 2 * width, 2 * width))
    assert KERNEL.values(apart, tile, H200)["boxes"] == (not changes and not tile.few)


@pytest.mark.parametrize(
    ("changes", "tile"),
    [
        ({"heads": 128}, "64x64x2"),
        ({"heads": 128, "causal": True}, "64x64x2"),
        ({"heads": 256}, "64x64x2"),
        ({"heads": 64}, "64x64"),
        ({"heads": 192}, "64x64"),  # three blocks side by side
        ({"heads": 64, "S_q": 2}, "64x64x2"),
        ({"heads": 64, "S_q": 2, "causal": True}, "64x64"),  # which see other keys
    ],
)
def test_pairs_of_blocks_convert_a_tile_together(changes: dict[str, object], tile: str) -> None:
    p = problem(**changes, **SCALED)  # type: ignore[arg-type]
    found = KERNEL.tile(p, ROW, H200)
    assert found.name == tile
    assert KERNEL.config(p, found, ROW, H200).cluster == (found.cluster, 1, 1)
    assert KERNEL.values(p, found, H200)["staggered"] == 0
    bf16 = problem(**changes)  # type: ignore[arg-type]
    assert PAIR not in KERNEL.tiles(bf16.spec, ROW)


def test_problems_are_refused_by_their_numbers() -> None:
    for taken in (
        problem(),
        problem(S_q=4096, causal=True),
        problem(S_q=4096, total_q=99),
        problem(S_q=4096, total_q=99, kv_view="packed", lengths=False),
    ):
        assert KERNEL.refuse(taken, ROW) is None
    scaled = replace(problem(), scale=-1.0)
    assert KERNEL.refuse(scaled, ROW) == "scale = -1.0: it takes more than 0"


@pytest.mark.parametrize("lengths", [True, False])
@pytest.mark.parametrize(("S_q", "heads"), [(1, 1), (1, 8), (1, 16), (1, 128), (4, 16), (64, 8)])
@pytest.mark.parametrize(("batch", "S_k"), [(1, 64), (1, 4096), (64, 64), (64, 4096), (256, 512)])
def test_it_is_chosen(batch: int, S_k: int, S_q: int, heads: int, lengths: bool) -> None:
    """The shared kernel took 273 µs where this one takes 87 (64 × 4096, 8 heads, H200)."""
    view = {} if lengths else {"kv_view": "strided", "lengths": False}
    found = select(problem(S_q, S_k, heads, batch, **view), product("H200"), None)
    assert found.implementation.name == "sm90-latent"


def test_a_block_may_leave_two_states_for_the_merge() -> None:
    p = problem()
    first, second = KERNEL.launches(p, TILE, H200).kernels
    assert (first.kernel, second.kernel) == (KERNEL, MERGE)
    blocks = KERNEL.grid(p, TILE, H200)
    assert blocks == 132
    rows = 2 * blocks * 64
    assert first.workspace == second.workspace == {"sums": 0, "sums_lse": rows * 512 * 4}
    assert KERNEL.launches(p, TILE, H200).workspace_bytes == rows * 513 * 4


def test_both_kernels_know_the_same_list() -> None:
    p = problem(S_q=2, heads=130)
    names = ("S_q", "S_k", "batch", "kv_heads", "head_group", "together", "groups")
    values = [k.values(p, TILE, H200) for k in (KERNEL, MERGE)]
    for found in values:
        assert [found[n] for n in names] == [2, 4096, 64, 1, 130, 1, 132]
    # each member of a group joins rows of both ends by two blocks of 8 warps
    assert MERGE.grid(p, TILE, H200) == 132 * 4 and MERGE.threads(TILE, ROW) == 256


@pytest.mark.parametrize(("page_size", "boxes"), [(64, 1), (128, 1), (48, 0), (1, 0)])
def test_tiles_of_one_page_are_boxes(page_size: int, boxes: int) -> None:
    p = replace(problem(), page_size=page_size, pages=500)
    assert KERNEL.values(p, TILE, H200)["boxes"] == boxes
    found = KERNEL.tensor_maps(p, TILE, H200)["k_map"]
    assert (found.operand, found.box, found.swizzle) == ("k", (64, 64, 1, 1), 128)
    assert found.extents == (576, page_size, 1, 500 if boxes else 1)
    assert found.strides == (1, 576, 576, 64 * 576)


def test_entries_that_share_their_keys_have_no_boxes() -> None:
    """TMA takes no strides of 0."""
    dense = replace(problem(kv_view="strided"), k_strides=(0, 0, 576))
    assert KERNEL.values(dense, TILE, H200)["boxes"] == 0
    apart = replace(dense, k_strides=(4096 * 576, 0, 576))
    assert KERNEL.values(apart, TILE, H200)["boxes"] == 1
    found = KERNEL.tensor_maps(apart, TILE, H200)["k_map"]
    assert found.extents == (576, 4096, 1, 64) and found.strides == (1, 576, 0, 4096 * 576)


def test_few_keys_take_few_blocks() -> None:
    """One group of two: both tiles of heads read the same keys."""
    p = problem(S_k=65, batch=1)
    assert KERNEL.grid(p, TILE, H200) == 2 * (2 + TILE.item_cost) // (TILE.item_cost + 2)


@pytest.mark.parametrize(
    ("S_q", "heads", "total_q", "together"),
    [
        (1, 16, 0, 1),
        (1, 128, 0, 2),
        (2, 128, 0, 4),
        (3, 16, 0, 1),  # 48 rows
        (5, 64, 0, 1),
        (6, 64, 0, 3),
        (8, 128, 0, 4),
        (81, 64, 0, 4),  # three of 84 wait
        (512, 16, 64 * 300, 4),
        (512, 16, 64 * 9, 1),  # most have few queries
        (512, 128, 64 * 9, 2),
        (1, 16, 64, 1),
    ],
)
def test_tiles_of_rows_over_the_same_keys_are_taken_side_by_side(
    S_q: int, heads: int, total_q: int, together: int
) -> None:
    p = problem(S_q=S_q, heads=heads, total_q=total_q)
    values = KERNEL.values(p, TILE, H200)
    assert values["together"] == together
    assert KERNEL.grid(p, TILE, H200) == 132
    # tiles of one item alone wait for keys, not for each other's products
    assert (values["staggered"] > 0) == (S_q * heads > 64)


@pytest.mark.parametrize("S_q", [1, 70, 700])
def test_packed_queries_are_as_many_as_there_are(S_q: int) -> None:
    """Few of them take few blocks, though one entry might have all; and they cost no more."""
    few, many = (problem(S_q=S_q, S_k=64, heads=16, batch=9, total_q=n) for n in (8 + S_q, 9 * S_q))
    blocks = [KERNEL.grid(p, TILE, H200) for p in (few, many)]
    assert blocks[0] * (TILE.item_cost + 2) >= 9 and blocks[0] <= blocks[1] <= 132
    costs = [KERNEL.work(p, TILE, H200) for p in (few, many)]
    assert costs[0].operations * costs[0].blocks <= costs[1].operations * costs[1].blocks
