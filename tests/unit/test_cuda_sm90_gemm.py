"""The kernel definition of Hopper's GEMM: what it takes, what it is launched with. Nothing here
needs a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hopper import ROW, with_rates
from hypothesis import given
from hypothesis import strategies as st
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec, HeadsSpec, Segment
from kernelseam.dtypes import DType
from kernelseam.epilogues import (
    Epilogue,
    amax,
    column_sums,
    epilogue_expression,
    residual,
    row_sums,
    softcap,
)
from kernelseam.expressions.epilogues import epilogue_text
from kernelseam_cuda import archs, tensor_maps
from kernelseam_cuda.sm90.gemm import HopperGemm
from kernelseam_cuda.sm90.gemm_tiling import kept_bytes, last_wave, strips_of
from kernelseam_cuda.sm90.tiles import (
    E4M3,
    E4M3_BLOCKS,
    GEMM,
    HEADS,
    ONE_WAVE,
    PING_PONG,
    REGISTERS,
    SPLIT,
    HopperGemmTile,
)
from refusals import refusals

HALF = HopperGemm()
H200 = with_rates()
BF16, F16, F32 = DType.bfloat16, DType.float16, DType.float32
FN = DType.float8_e4m3fn


def with_text(epilogue: Epilogue) -> str:
    return epilogue_text(epilogue_expression(epilogue).structure)


WITH_SUMS = with_text(["gelu", column_sums(np.zeros(512, np.float32))])
WITH_SMALL_BLOCKS = with_text(amax(np.zeros((32, 64), np.float32), block=(16, 8)))


def problem(
    M: int = 512,
    N: int = 512,
    K: int = 256,
    batch: int = 4,
    heads: int = 3,
    group: int = 1,
    **spec: object,
) -> GemmProblem:
    """Packed matrices."""
    s = GemmSpec(**{"dtype": BF16, "dtype_c": BF16, "dtype_acc": F32, **spec})
    a_row, b_row = (M if s.a_transposed else K), (K if s.b_transposed else N)
    lists = s.view == "pointers"

    def strides(row: int, size: int, heads: int) -> tuple[int, int, int]:
        return (0, 0, row) if lists else (heads * size, size, row)

    return GemmProblem(
        s,
        M,
        N,
        K,
        batch,
        heads,
        strides(a_row, M * K, heads),
        strides(b_row, N * K, heads // group),
        strides(N, M * N, heads),
        group,
        residual_strides=strides(N, M * N, heads) if s.residual else (0, 0, 0),
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    refusals("sm90_gemm", "sm90", globals()),
)
def test_what_the_kernel_does_not_take_is_refused_by_name(
    changes: dict[str, object], reason: str
) -> None:
    assert HALF.refuse(problem(**changes), ROW) == reason


def with_sums(**more: Any) -> GemmProblem:
    return replace(problem(epilogue=WITH_SUMS, **more), reduction_strides=((1,),))


def test_sums_in_an_epilogue_are_added_up_behind_the_product() -> None:
    """A part is of a consumer's 64 rows, or one of them, and of the tile's columns, or one of them;
    where a number is of a block's, of 64 of them, of a gate's 96 of 32."""
    p = with_sums(M=100, N=200, batch=1, heads=1)
    assert HALF.refuse(p, ROW) is None
    for tile in HALF.tiles(p.spec, ROW):
        plan = HALF.launches(p, tile, H200)
        product, *added = plan.kernels
        if tile.tail_slices:  # whose words and sums lie behind
            assert product.workspace["parts_0"] == 0 and tile.adds_up
            continue
        assert plan.workspace_bytes == 4 * 2 * -(-200 // tile.bn) * tile.bn
        assert product.workspace == {"parts_0": 0}
        if tile.adds_up:
            assert (added, product.operands) == ([], {"reduced_numbers_0": "reduction_0"})
            assert plan.zeroed_bytes == plan.workspace_bytes
        else:
            assert [x.workspace for x in added] == [{"parts": 0}]
            assert (added[0].problem.of, product.operands) == ((1, 2, 1), {})
            assert plan.zeroed_bytes == 0
    block = amax(np.empty((100, 1), np.float32), block=(1, 96))
    for epilogue, narrow in ((column_sums(np.empty(96, np.float32)), False), (block, True)):
        gate = with_epilogue(["swiglu", epilogue], M=100, N=192)
        wide = {t.bn: strips_of(gate, t).wide for t in HALF.tiles(gate.spec, ROW)}
        assert wide[192] == (32 if narrow else 96)
        assert (128 in wide) is not narrow, "its 64 columns are of no block of 96"


def test_a_launch_adds_up_its_own_parts_where_all_tiles_run_at_once() -> None:
    """Where they do not, a block would wait for tiles whose blocks have not begun."""
    sums = [row_sums(np.zeros((2, 600), "f4")), column_sums(np.zeros(600, "f4"))]
    p = problem(epilogue=with_text(sums), M=600, N=600, K=64, batch=2, heads=1, b_transposed=True)
    p = replace(p, reduction_strides=((600, 1), (1,)))
    tile = HALF.tile(p, ROW, H200)
    assert tile.adds_up and "-adds" in tile.name
    names = HALF.variants(p, ROW, H200)
    assert {tile.name, tile.name.replace("-adds", "")} <= {*names}
    assert not any(t.adds_up and t.ping_pong for t in HALF.tiles(p.spec, ROW))
    values = HALF.values(p, tile, H200)
    reduced = [values[f"reduced_{n}_{i}"] for i in range(2) for n in ("matrix", "row", "column")]
    assert reduced == [600, 1, 0, 0, 0, 1]
    assert [values[f"reduced_matrices_{i}"] for i in range(2)] == [1, 2]
    many = replace(p, M=6000, reduction_strides=((6000, 1), (1,)))
    assert not HALF.takes(many, tile, ROW, H200) and not HALF.tile(many, ROW, H200).adds_up
    assert not any(t.adds_up for t in HALF.variants(many, ROW, H200).values())
    small = replace(H200, limits=replace(H200.limits, compute_units=8))
    assert not HALF.tile(p, ROW, small).adds_up, "its blocks have several tiles each"


@pytest.mark.parametrize(
    ("epilogue", "preactivation", "store"),
    [
        ("silu", False, "rows"),
        ("silu", True, "tma"),
        ("gelu", False, "tma"),
        ("swiglu", True, "rows"),
        (["silu", row_sums(np.zeros(512, np.float32))], False, "tma"),
        (["silu", column_sums(np.zeros(6144, np.float32))], False, "tma"),
        (["silu", amax(np.zeros((512, 48), np.float32), block=(1, 128))], False, "tma"),
    ],
)
def test_who_stores_tiles_that_run_at_once(epilogue: Any, preactivation: bool, store: str) -> None:
    """Warps, where the epilogue is cheap; else TMA, while they compute the next panel."""
    asked = {"epilogue": with_text(epilogue), "preactivation": preactivation}
    p = problem(M=512, N=6144, K=4096, batch=1, heads=1, b_transposed=True, **asked)
    tile = HALF.tile(p, ROW, H200)
    assert (tile.bm, tile.bn, tile.store) == (128, 192, store)


def test_consumers_keep_parts_where_they_have_room() -> None:
    """16 bytes for each of 64 columns of its rows."""
    spec = with_sums(M=100, N=200, batch=1, heads=1).spec
    kept = {t.name: kept_bytes(spec, t) for t in HALF.tiles(spec, ROW)}
    assert kept["128x192-5-tma-2together"] == 16 * 2 * 64
    assert kept["128x192-5-tma-2together-pingpong"] == 16 * 2 * 2 * 64
    assert all(t.fits(False, kept[t.name]) for t in HALF.tiles(spec, ROW))
    twice = problem(epilogue=with_text(["gelu", *([column_sums(np.zeros(512, "f4"))] * 2)])).spec
    left_out = {*kept} - {t.name for t in HALF.tiles(twice, ROW)}
    bare = {n.replace("-adds", "").replace("-tail", "") for n in left_out}
    assert bare == {"128x128-5-tma", "128x128-5-rows"}, "four buffers leave 2.8 KB"


def test_sums_take_time_where_no_other_consumer_hides_them() -> None:
    """So that few tiles that take turns are chosen sooner with them than without."""
    p = with_sums(M=4096, N=6144, K=4096, batch=1, heads=1, b_transposed=True)
    plain = replace(p, spec=replace(p.spec, epilogue=with_text("gelu")), reduction_strides=())
    alone = {t.name: HALF.work(plain, t, H200).block_seconds for t in HALF.tiles(p.spec, ROW)}
    with_them = {t.name: HALF.work(p, t, H200).block_seconds for t in HALF.tiles(p.spec, ROW)}
    more = {n: x - alone[n] for n, x in with_them.items()}
    hidden = more.pop("128x192-5-tma-2together-pingpong")
    assert 0 < hidden < more["128x192-5-tma-2together"] / 4, "of the last tile alone"
    assert more["128x256-3-tma-2together"] == pytest.approx(128 * 256 * 1.2e-10)
    assert min(more.values()) > 0


def test_problems_are_refused_by_their_numbers() -> None:
    nothing = [
        problem(M=0),
        problem(N=0),
        problem(K=0),
        problem(batch=0),
        replace(problem(), alpha=0.0),
    ]
    assert {HALF.refuse(p, ROW) for p in nothing} == {"there is nothing to multiply"}
    most = 2**31 - 2**16
    assert (
        HALF.refuse(problem(M=1, N=8, K=8, batch=most, heads=1), ROW)
        == "it needs 2147418112 tiles or more"
    )
    assert HALF.refuse(problem(M=1, N=8, K=8, batch=most - 1, heads=1), ROW) is None
    assert (
        HALF.refuse(problem(M=2**30, batch=1, heads=1), ROW)
        == "M = 1073741824: it takes less than 2**30"
    )
    assert (
        HALF.refuse(problem(N=2**30, batch=1, heads=1), ROW)
        == "N = 1073741824: it takes less than 2**30"
    )
    assert HALF.refuse(problem(vector_r=2), ROW) is None, "there is no residual"
    heads = replace(problem(), spec=replace(problem().spec, heads=HeadsSpec()))
    assert HALF.refuse(heads, ROW) == "heads is not supported by this kernel"


def test_scales_of_blocks() -> None:
    """Those of a slice along K and of 64 columns of a tile."""
    deep: dict[str, Any] = {"dtype": FN, "dtype_c": F16, "b_transposed": True, "scales": True}
    own = problem(**deep, scale_block=(1, 128, 128))
    assert HALF.refuse(own, ROW) is None
    assert HALF.tiles(own.spec, ROW) == E4M3_BLOCKS
    for sizes in ((1, 128, 64), (1, 32, 128)):
        assert HALF.refuse(problem(**deep, scale_block=sizes), ROW) == (
            f"scale_block = {sizes}: it scales blocks of 128 values of k and of multiples of 64 "
            "columns"
        )


@pytest.mark.parametrize("tile", E4M3, ids=lambda t: t.name)
@pytest.mark.parametrize("view", ["strided", "pointers"])
def test_factors_of_8_bits(tile: HopperGemmTile, view: str) -> None:
    """Maps that the hardware takes, 128 of K a box; both sums of a thread fit its registers."""
    p = problem(dtype=FN, dtype_c=F16, view=view, b_transposed=True, scales=True)
    assert HALF.refuse(p, ROW) is None
    maps = HALF.tensor_maps(p, tile, H200)
    assert maps["a_map"].box[:2] == (128, tile.bm)
    assert maps["b_map"].box[:2] == (128, tile.bn // tile.cluster)
    for m in maps.values():
        assert tensor_maps.refuse(m, 16) is None
    sums = 2 * tile.bm * tile.bn // (128 * tile.groups)
    assert sums <= (REGISTERS[tile.groups][1] or 65536 // (256 * tile.blocks)) - 30
    constants = HALF.constants(p.spec, tile, ROW)
    assert (constants["T"], constants["TC"], constants["SCALES"]) == ("e4m3", "f16", p.spec.scales)


@pytest.mark.parametrize(
    ("M", "N", "K", "batch", "name"),
    [
        (512, 6144, 4096, 1, "128x192-5-tma"),
        (64, 6144, 4096, 1, "64x64-6-rows-2blocks"),
        (1024, 1024, 1024, 64, "128x128-6-tma"),
    ],
)
def test_the_tile_that_was_the_fastest_of_8_bits(
    M: int, N: int, K: int, batch: int, name: str
) -> None:
    product = archs.row("sm_90a").product
    assert product is not None
    p = problem(M, N, K, batch, 1, dtype=FN, b_transposed=True)
    assert HALF.tile(p, ROW, product).name == name


@pytest.mark.parametrize(
    ("M", "N", "K", "name"),
    [
        (64, 7168, 2048, "64x64-6-rows-2blocks"),
        (512, 7168, 2048, "128x128-5-tma-turns"),
        (4096, 7168, 2048, "128x192-5-tma-turns-halves"),
        (4096, 4096, 7168, "128x128-5-tma-turns"),
        (8192, 8192, 8192, "128x192-5-tma-turns-halves"),
    ],
)
def test_the_tile_that_was_the_fastest_with_scales_of_blocks(
    M: int, N: int, K: int, name: str
) -> None:
    product = archs.row("sm_90a").product
    assert product is not None
    own: dict[str, Any] = {"dtype": FN, "b_transposed": True, "scales": True}
    p = problem(M, N, K, 1, 1, **own, scale_block=(1, 128, 128))
    assert HALF.tile(p, ROW, product).name == name


@pytest.mark.parametrize("tile", GEMM, ids=lambda t: t.name)
@pytest.mark.parametrize("view", ["strided", "pointers"])
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
def test_the_hardware_takes_every_map_of_every_tile(
    tile: HopperGemmTile, view: str, transposed: tuple[bool, bool]
) -> None:
    p = problem(view=view, a_transposed=transposed[0], b_transposed=transposed[1], residual=BF16)
    maps = HALF.tensor_maps(p, tile, H200)
    assert list(maps) == ["a_map", "b_map", "c_map", "residual_map"]
    assert [tensor_maps.refuse(m, 16) for m in maps.values()] == [None] * 4
    assert tile.shared_bytes(bias=True) <= ROW.shared_bytes_per_block // tile.blocks


def test_maps_walk_the_operands() -> None:
    tile = next(t for t in GEMM if (t.bm, t.bn, t.cluster) == (128, 256, 2))
    p = problem(M=300, N=520, K=200, heads=6, group=3, b_transposed=True)
    maps = HALF.tensor_maps(p, tile, H200)
    assert (maps["a_map"].extents, maps["a_map"].box) == ((200, 300, 6, 4), (64, 128, 1, 1))
    assert (maps["b_map"].extents, maps["b_map"].box) == ((200, 520, 2, 4), (64, 128, 1, 1)), (
        "half a tile a block"
    )
    assert maps["b_map"].strides == (1, 200, 104_000, 208_000)
    assert (maps["c_map"].operand, maps["c_map"].extents, maps["c_map"].box) == (
        "C",
        (520, 300, 6, 4),
        (64, 64, 1, 1),
    )
    turned = HALF.tensor_maps(problem(M=304, K=200, a_transposed=True), tile, H200)
    assert (turned["a_map"].extents[:2], turned["a_map"].box[:2]) == ((304, 200), (64, 64))
    assert turned["b_map"].box[:2] == (64, 32), "half of a slice's rows a block"


def test_results_of_float32_leave_in_panels_of_32_columns() -> None:
    p = problem(N=520, dtype_c=F32, residual=F32)
    for tile in GEMM:
        maps = HALF.tensor_maps(p, tile, H200)
        assert [tensor_maps.refuse(m, 16) for m in maps.values()] == [None] * 4
        for name in ("c_map", "residual_map"):
            assert (maps[name].dtype, maps[name].box) == (F32, (32, 64, 1, 1))
        assert maps["a_map"].dtype is BF16
        assert HALF.constants(p.spec, tile, ROW)["TC"] == "float"
    lists = HALF.tensor_maps(problem(view="pointers", dtype_c=F32), GEMM[0], H200)
    assert lists["c_map"].strides[2] * 4 == lists["a_map"].strides[2] * 2 == 16
    odd = {t.store for t in HALF.variants(problem(N=522, dtype_c=F32), ROW, H200).values()}
    assert odd == {"rows"}, "TMA stores whole chunks of 16 bytes"
    even = {t.store for t in HALF.variants(problem(N=524, dtype_c=F32), ROW, H200).values()}
    assert even == {"rows", "tma"}, "four of float32"


def test_slices_of_float32_are_half_as_long_and_rounded_by_the_loads() -> None:
    p = problem(dtype=F32, dtype_c=F32, precision="tf32", b_transposed=True, residual=F32)
    assert HALF.refuse(p, ROW) is None
    for tile in GEMM:
        maps = HALF.tensor_maps(p, tile, H200)
        assert [tensor_maps.refuse(m, 16) for m in maps.values()] == [None] * 4
        assert [m.to_tf32 for m in maps.values()] == [True, True, False, False]
        assert maps["a_map"].box[:2] == (32, tile.bm)
        assert maps["b_map"].box[:2] == (32, tile.bn // tile.cluster)
        assert HALF.values(p, tile, H200)["slices"] == 8
    half = problem(b_transposed=True)
    assert HALF.values(half, GEMM[0], H200)["slices"] == 4
    single, same = (HALF.work(x, GEMM[0], H200) for x in (p, half))
    assert single.operations == 2 * same.operations, "as long as twice the products of 16 bits"


def test_a_matrix_that_all_share_has_one_place_in_its_map() -> None:
    p = replace(problem(), b_strides=(0, 0, 512))
    tile = HALF.tile(p, ROW, H200)
    assert HALF.tensor_maps(p, tile, H200)["b_map"].extents == (512, 256, 1, 1)
    values = HALF.values(p, tile, H200)
    steps = [values[f"{n}_step"] for n in ("b_head", "b_batch", "a_head", "a_batch")]
    assert steps == [0, 0, 1, 1]


def test_a_list_is_walked_from_the_workspace_on_by_units_that_reach_every_address() -> None:
    p = problem(view="pointers", residual=BF16)
    tile = HALF.tile(p, ROW, H200)
    launches = HALF.launches(p, tile, H200)
    assert launches.workspace_bytes == 256
    assert launches.kernels[0].workspace == dict.fromkeys(
        ("a_map", "b_map", "c_map", "residual_map", "origin"), 0
    )
    for m in HALF.tensor_maps(p, tile, H200).values():
        unit, length = (s * 2 for s in m.strides[2:])
        assert (unit, length) == (16, 16 * m.extents[2])
        assert m.extents[2] * m.extents[3] * 16 == 2**64
    assert HALF.launches(problem(), tile, H200).workspace_bytes == 0


def divided(values: dict[str, int | float], name: str, n: int) -> int:
    return (n * (int(values[f"{name}_magic"]) % 2**32)) >> (31 + int(values[f"{name}_shift"]))


@given(
    st.integers(1, 3000),
    st.integers(1, 3000),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from(range(len(GEMM))),
)
def test_every_tile_is_walked_once(M: int, N: int, batch: int, heads: int, index: int) -> None:
    """TileScheduler of tiles.h in Python."""
    tile, p = GEMM[index], problem(M=M, N=N, K=64, batch=batch, heads=heads)
    v = HALF.values(p, tile, H200)
    rows = -(-M // (tile.bm * tile.cluster))
    seen = []
    for t in range(int(v["total"])):
        number = divided(v, "matrix", t)
        in_matrix = t - number * int(v["matrix"])
        group = divided(v, "group", in_matrix)
        in_group = in_matrix - group * int(v["group"])
        whole = tile.group_rows
        high = min(whole, rows - group * whole)
        column = in_group // whole if high == whole else divided(v, "last", in_group)
        entry, row = divided(v, "heads", number), group * whole + in_group - column * high
        seen.append((entry, number - entry * heads, row, column))
    columns = -(-N // tile.bn)
    assert sorted(seen) == [
        (b, h, r, c)
        for b in range(batch)
        for h in range(heads)
        for r in range(rows)
        for c in range(columns)
    ]


def test_a_grid_is_whole_clusters_and_no_more_than_there_are_tiles() -> None:
    for tile in GEMM:
        big, small = problem(M=8192, N=8192), problem(M=8, N=8, batch=1, heads=1)
        assert HALF.grid(big, tile, H200) == 132 * tile.blocks
        assert HALF.grid(small, tile, H200) == tile.cluster
        assert HALF.config(small, tile, ROW, H200).cluster == (tile.cluster, 1, 1)


def test_tiles_have_names_of_their_own() -> None:
    tiles = (*HEADS, *SPLIT)
    assert len({t.name for t in GEMM}) == len(GEMM) and len({t.name for t in tiles}) == len(tiles)


def few_tokens(M: int, **spec: object) -> GemmProblem:
    return problem(M=M, N=4096, K=4096, batch=1, heads=1, b_transposed=True, **spec)


def test_a_linear_layer_of_few_tokens_splits_its_sums_over_a_cluster() -> None:
    p = few_tokens(64)
    split = [t for t in HALF.offered(p) if t.split > 1]
    assert split == list(SPLIT) and HALF.tile(p, ROW, H200) in split
    for t in split:
        tiles = -(-64 // t.bm) * -(-4096 // t.bn)
        assert HALF.grid(p, t, H200) == tiles * t.split, "a cluster has one tile"
        assert HALF.config(p, t, ROW, H200).cluster == (t.split, 1, 1)
        assert HALF.constants(p.spec, t, ROW)["SPLIT"] == t.split


def test_sums_are_split_where_there_are_few_tiles_and_something_for_each_part() -> None:
    assert not any(t.split > 1 for t in HALF.offered(few_tokens(16384)))
    short = replace(few_tokens(64), K=128)
    assert {t.split for t in HALF.offered(short)} == {1, 2}, "two slices are not for four blocks"
    five = replace(few_tokens(64), K=5 * 64)
    assert {t.split for t in HALF.offered(five)} == {1, 2}, "2 + 2 + 1 + 0"
    assert not any(t.split > 1 for t in HALF.offered(few_tokens(64, summed=True)))
    both = replace(few_tokens(64, residual=DType.bfloat16), beta=-1.0)
    assert any(t.split > 1 for t in HALF.offered(both))


@pytest.mark.parametrize(
    ("extents", "tile"),
    [
        ((568, 1920, 7040), "128x80-8-rows-4together-of-a"),  # 5 rows of 6 clusters
        ((71, 11264, 5248), "128x96-7-rows-4together-of-a"),  # 30 clusters
        ((33, 9856, 2880), "64x96-10-rows-4together-of-a"),
        ((4373, 320, 3968), "192x80-5-rows-4together-of-a"),  # 23 rows of one
        ((124, 960, 8640), "64x64-13-rows-split4"),  # 2 rows of 15 tiles
    ],
)
def test_a_linear_layer_of_few_tiles_has_such_as_fill_one_wave(
    extents: tuple[int, int, int], tile: str
) -> None:
    """Each the fastest on an H200."""
    M, N, K = extents
    p = with_epilogue("relu", M=M, N=N, K=K, spec={"bias": DType.bfloat16})
    chosen = HALF.tile(p, ROW, H200)
    assert chosen.name == tile and HALF.grid(p, chosen, H200) <= 120
    maps, parts = HALF.tensor_maps(p, chosen, H200), chosen.cluster
    assert maps["a_map"].box[:2] == (64, chosen.bm // parts)
    assert maps["b_map"].box[:2] == (64, chosen.bn)


def test_tiles_of_one_wave_are_of_sums_that_nothing_is_added_to() -> None:
    p = with_epilogue("relu", M=568, N=1920, K=7040, spec={"bias": DType.bfloat16})
    assert set(ONE_WAVE) & set(HALF.offered(p))
    for other in (
        replace(p, M=4 * p.M),  # more than one wave
        replace(p, K=15 * 64),  # too few slices to hide a cluster's start
        replace(p, batch=2),
        replace(p, beta=0.5),
        with_epilogue("relu", M=568, N=1920, K=7040, spec={"residual": DType.bfloat16}),
        with_epilogue("swiglu", M=568, N=1920, K=7040),
        with_epilogue("relu", M=568, N=1920, K=7040, spec={"b_transposed": False}),
        few_tokens(568, dtype_c=DType.float8_e4m3fn),
    ):
        assert not set(ONE_WAVE) & set(HALF.offered(other))


def test_a_split_tile_is_offered_where_its_ring_has_room_behind_the_source_tiles() -> None:
    tile = SPLIT[0]
    assert (tile.bm, tile.bn, tile.split, tile.stages) == (64, 64, 2, 4)
    assert [tile.stages_after_sums(sources) for sources in (0, 1, 2)] == [1, 2, 3]
    wide = replace(tile, bm=64, bn=192, split=3, stages=4)
    # 96 KB of sums in stages of 32 KB, and three panels of C or of the residual in one
    assert [wide.stages_after_sums(sources) for sources in (0, 1, 2)] == [3, 4, 5]
    added = few_tokens(64, residual=DType.bfloat16)
    assert HALF.few_enough(added, wide)
    assert not HALF.few_enough(replace(added, beta=-1.0), wide)


def test_few_rows_alone_are_loaded() -> None:
    """A slice is of fewer bytes, so the ring is longer, and the other blocks' sums are few."""
    p = replace(few_tokens(16), N=1024)
    few = {t.split: t for t in HALF.offered(p) if t.few_rows == 16}
    assert HALF.tile(p, ROW, H200) in few.values() and sorted(few) == [1, 2, 4, 8]
    for split, t in few.items():
        constants, maps = HALF.constants(p.spec, t, ROW), HALF.tensor_maps(p, t, H200)
        assert (constants["A_ROWS"], constants["BM"]) == (16, 64)
        assert maps["a_map"].box[:2] == (64, 16) and maps["b_map"].box[:2] == (64, 64)
        assert t.stages * t.stage_bytes == 9 * 80 * 128
        assert t.stages_after_sums(2) == 2 + -(-(split - 1) * 16 * 64 * 4 // t.stage_bytes)
    more = {t.few_rows for t in HALF.offered(replace(p, M=17))}
    assert more == {0, 32} and {t.few_rows for t in HALF.offered(replace(p, M=33))} == {0}
    assert not any(t.few_rows for t in HALF.offered(replace(p, batch=2))), "one product"
    assert {t.split for t in HALF.offered(replace(p, K=128)) if t.few_rows == 16} == {1, 2}


def cut(M: int, **changes: Any) -> GemmProblem:
    return replace(few_tokens(M), **changes)


@pytest.mark.parametrize(
    ("p", "wave"),
    [
        (cut(1024, N=1024, K=16384), (0, 128, 1)),  # 64 tiles of 132, by two blocks each
        (cut(568, N=1920, K=7040), None),  # 75
        (cut(33, N=9856, K=2880), (0, 27, 2)),  # 77 that share no B: as many slices each
        (cut(8192, N=1792, K=14336), (6, 177, 2)),  # so in many waves: 6 and 104 tiles
        (cut(3717, N=3392, K=7488), (6, 17, 6)),  # 6 and 18
        (cut(3717, N=3392, K=2048), (6, 16, 1)),  # of 32 slices
        (cut(3717, N=3392, K=1024), None),
        (cut(300, N=512, K=2048, beta=1.0), (0, 16, 1)),
        (cut(300, N=512, K=1000), None),
        (cut(4224, N=2048, K=8192), None),  # whole waves
        (cut(16384, N=6144, K=8192), None),  # of which there are many
    ],
)
def test_tiles_of_a_last_wave_are_cut_along_k(
    p: GemmProblem, wave: tuple[int, int, int] | None
) -> None:
    """Waves before, a block's slices, and blocks whose sums it adds up, at most."""
    (tile,) = (t for t in HALF.tiles(p.spec, ROW) if t.tail_slices and t.bn == 128)
    assert last_wave(p, tile, H200) == wave
    assert (tile in HALF.able(p, H200)) == (wave is not None)
    assert HALF.takes(p, tile, ROW, H200), "which is right wherever nothing is cut"
    launches = HALF.launches(p, tile, H200)
    (own,) = launches.kernels
    assert HALF.grid(p, tile, H200) == 132 and own.workspace == {"origin": 0, "sums": 1280}
    assert launches.zeroed_bytes == 1280, "a word for each consumer"
    assert launches.workspace_bytes == 1280 + 132 * 128 * 128 * 4


def test_sums_of_cut_tiles_lie_behind_the_parts_of_what_is_reduced() -> None:
    """Both these and the words are 0 before and after; of few rows, few sums."""
    squares = row_sums(np.empty(1, np.float32), lambda acc, m, n, batch: acc * acc)
    p = with_epilogue(["silu", squares], M=1, N=13184, K=13248)
    p = replace(p, reduction_strides=((1,),))
    offered = {t.a_rows: t for t in HALF.able(p, H200) if t.tail_slices and t.bm == 64}
    assert sorted(offered) == [16, 32, 64]
    assert last_wave(p, offered[16], H200) == (0, 162, 2)
    launches = HALF.launches(p, offered[16], H200)
    (own,) = launches.kernels
    parts = 206 * 64 * 4  # of the rows of a strip
    assert own.workspace == {"parts_0": 0, "origin": parts, "sums": parts + 1280}
    assert launches.zeroed_bytes == parts + 1280
    assert launches.workspace_bytes == parts + 1280 + 264 * 16 * 64 * 4
    assert all(t.adds_up for t in offered.values()), "a second launch has no such workspace"


def test_what_lies_otherwise_is_not_cut() -> None:
    for spec in ({"view": "pointers"}, {"a_transposed": True}, {"dtype_c": DType.float32}):
        assert not any(t.tail_slices for t in HALF.tiles(few_tokens(64, **spec).spec, ROW))


def test_a_factor_along_m_has_a_ring_of_four_slices() -> None:
    """Of a weight's gradient, whose tokens lie along K; the input's has three and more buffers."""
    large = {"batch": 1, "heads": 1}
    d_weight = problem(M=4096, N=4096, K=16384, a_transposed=True, **large)
    d_input = problem(M=16384, N=4096, K=4096, **large)
    for p, name in ((d_weight, "128x256-4-tma-2together"), (d_input, "128x256-3-tma-2together")):
        assert HALF.tile(p, ROW, H200).name == name
    assert HALF.config(d_input, HALF.tile(d_input, ROW, H200), ROW, H200).programmatic


def test_lists_at_any_place_are_stored_by_warps_or_read_by_pairs() -> None:
    """Where matrices begin within lines of the cache: rows of 256 bytes share fewer of them where C
    is most of what is moved, and pairs read fewer of them."""
    many = {"view": "pointers", "b_transposed": True, "heads": 1}
    scores, square = problem(2048, 2048, 128, 256, **many), problem(1024, 1024, 1024, 64, **many)
    limits = replace(H200.limits, operations_per_second={"bfloat16": 1.07e15})
    for p, whole, other in (
        (scores, "128x128-5-tma-2together-cfirst", "256x128-4-rows"),
        (square, "128x128-5-tma", "128x256-3-tma-2together"),
    ):
        names = [
            HALF.tile(replace(p, whole_lines=w), ROW, replace(H200, limits=limits)).name
            for w in (True, False)
        ]
        assert names == [whole, other]


def test_pairs_of_a_result_that_is_most_of_what_is_moved_are_for_no_other() -> None:
    scores, square = (
        problem(M, M, K, 64, 1, b_transposed=True) for M, K in ((2048, 128), (1024, 1024))
    )
    pairs = "128x128-5-tma-2together-cfirst"
    assert pairs in HALF.variants(scores, ROW, H200)
    assert not any(t.mostly_c for t in HALF.offered(square))
    (tile,) = (t for t in GEMM if t.mostly_c)
    launched = [t.name for t in HALF.as_launched(scores.spec, tile)]
    assert launched == [f"128x128-{n}-tma-2together-cfirst" for n in (5, 4, 3, 2)]


@pytest.mark.parametrize(
    ("bandwidth", "k", "stages"),
    [(4.8e12, 128, 5), (3.35e12, 0, 2), (3.35e12, 64, 2), (3.35e12, 128, 3), (3.35e12, 320, 5)],
)
def test_where_memory_is_slow_a_large_result_is_made_in_step(
    bandwidth: float, k: int, stages: int
) -> None:
    """A ring of one slice more than a tile sums; tuning times the longer one, too."""
    p = problem(2048, 2048, k, 64, 1, b_transposed=True)
    limits = replace(H200.limits, operations_per_second={"bfloat16": 1.07e15})
    device = replace(H200, limits=replace(limits, bytes_per_second=bandwidth))
    name = f"128x128-{stages}-tma-2together-cfirst"
    assert {name, "128x128-5-tma-2together-cfirst"} <= set(HALF.variants(p, ROW, device))
    assert k == 0 or HALF.tile(p, ROW, device).name == name


def test_warps_store_tiles_that_all_run_at_once() -> None:
    """No other tile's products hide TMA's stores there. Most of B leaves the cache first."""
    for M, name in ((512, "128x192-5-rows-2together"), (1024, PING_PONG.name)):
        p = problem(M, 6144, 4096, 1, 1, b_transposed=True)
        tile = HALF.tile(p, ROW, H200)
        assert tile.name == name
        assert HALF.constants(p.spec, tile, ROW)["B_FIRST"] == (M == 512)


def test_segments_have_a_map_each_and_the_head_that_each_begins_with() -> None:
    segments = tuple(Segment(n, (64 * 512 * n, 64 * 512, 64)) for n in (4, 2, 2))
    p = replace(
        problem(M=512, N=512, K=64, batch=2, heads=8, summed=True, segmented=True),
        a_strides=(0, 0, 0),
        c_head_group=8,
        segments=segments,
        c_strides=(512 * 512, 0, 512),
    )
    assert HALF.refuse(p, ROW) is None
    tile = HALF.tile(p, ROW, H200)
    maps = HALF.tensor_maps(p, tile, H200)
    assert [maps[n].operand for n in ("a_map", "a1_map", "a2_map")] == ["A", "A1", "A2"]
    assert [maps[n].extents[2] for n in ("a_map", "a1_map", "a2_map")] == [4, 2, 2]
    assert maps["c_map"].extents == (512, 512, 1, 2), "one result an entry of the batch"
    v = HALF.values(p, tile, H200)
    assert [v[n] for n in ("a1_first", "a2_first", "batch_group", "head_group")] == [4, 6, 1, 8]
    shared = replace(p, segments=(*segments[:2], Segment(2, (0, 64, 64))))
    assert HALF.refuse(shared, ROW) == "heads or batches of A's segments share memory"


@pytest.mark.parametrize("dim", [64, 128, 96])
def test_joined_heads_are_of_whole_boxes(dim: int) -> None:
    p = replace(
        problem(M=300, N=8 * dim, K=256, batch=1, heads=1, a_transposed=True, joined="b"),
        joined_heads=8,
        b_strides=(0, 256 * dim, dim),
    )
    if dim % 64:
        assert HALF.refuse(p, ROW) == "it does not join such heads along B"
        return
    tile = HALF.tile(p, ROW, H200)
    assert HALF.tensor_maps(p, tile, H200)["b_map"].extents == (dim, 256, 8, 1)
    assert HALF.values(p, tile, H200)["joined"] == dim
    assert HALF.constants(p.spec, tile, ROW)["JOINED"] == 2


H100 = replace(
    H200,
    limits=replace(
        H200.limits,
        bytes_per_second=3.35e12,
        operations_per_second={"bfloat16": 9.9e14, "float32": 6e13},
    ),
)


def with_epilogue(epilogue: Epilogue, **sizes: Any) -> GemmProblem:
    """A linear layer's product of a batch of one."""
    text = with_text(epilogue)
    spec = {"b_transposed": True, **sizes.pop("spec", {})}
    return problem(batch=1, heads=1, epilogue=text, **sizes, **spec)


@pytest.mark.parametrize(
    ("epilogue", "rows", "tile"),
    [
        ("relu", 16384, PING_PONG.name),
        ("swiglu", 16384, PING_PONG.name),
        ("silu", 16384, PING_PONG.name),
        (softcap(30.0), 16384, PING_PONG.name),
        (["silu", residual(np.zeros((1, 1)))], 16384, "128x256-3-tma-2together"),
        ("silu", 4096, PING_PONG.name),
        ("silu", 2048, "128x256-3-tma-2together"),
        ("swiglu", 512, "128x192-5-rows-2together"),
        ("silu", 64, "64x64-13-rows-4together-of-a"),
    ],
)
def test_ping_pong_hides_an_epilogue_where_tiles_are_many(
    epilogue: Epilogue, rows: int, tile: str
) -> None:
    p = with_epilogue(epilogue, M=rows, N=6144 if rows != 2048 else 4096, K=4096)
    assert HALF.refuse(p, ROW) is None
    assert HALF.tile(p, ROW, H100).name == tile


@pytest.mark.parametrize(
    ("options", "takes"),
    [
        ({}, True),
        ({"bias": BF16, "preactivation": True}, True),
        ({"residual": BF16}, True),
        ({"epilogue": with_text("swiglu"), "bias": BF16}, True),
        ({"epilogue": with_text("swiglu"), "preactivation": True}, True),
        ({"epilogue": with_text("swiglu"), "bias": BF16, "preactivation": True}, False),
        ({"dtype_c": F32}, False),
        ({"a_transposed": True}, False),
        ({"summed": True}, False),
        ({"residual": BF16, "bias": BF16}, False),
        ({"residual": BF16, "preactivation": True}, False),
        ({"epilogue": None}, True),
        ({"epilogue": None, "residual": BF16}, False),
        ({"epilogue": with_text(residual(np.zeros((1, 1))))}, False),
    ],
)
def test_ping_pong_takes_what_its_registers_hold(options: dict[str, Any], takes: bool) -> None:
    p = with_epilogue("silu", M=16384, N=6144, K=4096)
    spec = replace(p.spec, **options)
    assert (PING_PONG in HALF.tiles(spec, ROW)) is takes


@pytest.mark.parametrize(("stages", "dtype_c", "most"), [(5, BF16, 2), (4, BF16, 1), (3, F32, 0)])
def test_ping_pong_has_a_ring_for_its_sources(stages: int, dtype_c: DType, most: int) -> None:
    """A consumer gives its turn away when C's tile and the residual's have come, too: else the
    other's wait for a later phase of the same stage would end with an earlier one."""
    t = replace(PING_PONG, stages=stages)
    plain = with_epilogue("silu", spec={"dtype_c": dtype_c})
    both = replace(plain, spec=replace(plain.spec, residual=dtype_c), beta=0.5)
    found = [HALF.stores(p, t) for p in (plain, replace(plain, beta=0.5), both)]
    assert found == [n <= most for n in range(3)]


def test_pairs_of_columns_halve_boxes_and_the_result() -> None:
    """Of halves a box of B lies in one of them. TMA stores whole panels of the result, or boxes of
    half ones."""
    halves = with_epilogue("swiglu", N=1024, spec={"preactivation": True})
    for t in HALF.tiles(halves.spec, ROW):
        maps = HALF.tensor_maps(halves, t, H100)
        b_parts = 1 if t.shared_a else t.cluster
        assert maps["b_map"].box[1] == t.bn // max(b_parts, 2)
        assert (maps["c_map"].extents[0], maps["sums_map"].extents[0]) == (512, 1024)
        box = 32 if t.store == "tma" and t.bn % 128 else 64
        for name in ("c_map", "sums_map"):
            assert (maps[name].box[0], maps[name].swizzle) == (box, 2 * box)
    assert PING_PONG in HALF.tiles(halves.spec, ROW)
    along_n = with_epilogue("swiglu", N=1024, spec={"b_transposed": False})
    assert {t.bn for t in HALF.tiles(along_n.spec, ROW)} == {128, 256}


def test_an_epilogue_of_other_dtypes_is_refused() -> None:
    p = with_epilogue("relu", spec={"dtype": F32, "dtype_c": F32, "precision": "tf32"})
    assert HALF.refuse(p, ROW) == "epilogue of float32 is not supported by this kernel"


@pytest.mark.parametrize("epilogue", ["silu", "swiglu"])
def test_results_of_8_bits(epilogue: str) -> None:
    """TMA stores them in boxes of 128 columns, of 64, or of a gate's 96 of a tile."""
    p = with_epilogue(epilogue, dtype_c=FN)
    assert HALF.refuse(p, ROW) is None
    tiles = HALF.tiles(p.spec, ROW)
    assert PING_PONG in tiles
    for tile in tiles:
        c = HALF.tensor_maps(p, tile, H200)["c_map"]
        assert tensor_maps.refuse(c, 16) is None
        columns = tile.bn * p.c_columns // p.N
        assert tile.store == "rows" or columns % c.box[0] == 0
        assert c.swizzle == (c.box[0] if c.box[0] in (64, 128) else 0)
    for more in ({"residual": FN}, {"preactivation": True}):
        asked = with_epilogue(epilogue, dtype_c=FN, **more)
        assert "residual and preactivation of float8_e4m3fn" in str(HALF.refuse(asked, ROW))
    added = replace(with_epilogue("silu", dtype_c=FN), beta=0.5)
    assert "beta, residual" in str(HALF.refuse(added, ROW))
