"""The kernel definition of Hopper's grouped GEMM: what it takes, what it is launched with. Nothing
here needs a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hopper import ROW, with_rates
from hypothesis import given
from hypothesis import strategies as st
from kernelseam import GroupedGemm, GroupedGemmPointers

pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
from kernelseam_cuda.sm90.grouped import HopperGroupedGemm  # noqa: E402
from kernelseam_cuda.sm90.grouped_lists import HopperListedGemm  # noqa: E402
from kernelseam_cuda.sm90.tiles import (  # noqa: E402
    GROUPED,
    GROUPED_E4M3,
    GROUPED_E4M3_BLOCKS,
    GROUPED_INDEXED,
    GROUPED_INDEXED_E4M3,
    GROUPED_PING_PONG,
    SHARED_BYTES,
)

KERNEL = HopperGroupedGemm()
LISTS = HopperListedGemm()
H200 = with_rates()


def problem(**fields: Any) -> Any:
    given = {"groups": 64, "M": 8192, "N": 1408, "K": 2048, "along": "m", "dtype": "bfloat16"}
    return GroupedGemm(**{**given, **fields}).problem()


def listed(*sizes: tuple[int, int, int], **fields: Any) -> Any:
    """Products of these M, N and K."""
    m, n, k = zip(*sizes, strict=True)
    places = range(1 << 48, 1 << 62, 1 << 48)
    addresses = {f"{x}_ptrs": [*places[i::3][: len(sizes)]] for i, x in enumerate("ABC")}
    given = {"M": list(m), "N": list(n), "K": list(k), "dtype": "bfloat16", **addresses}
    return GroupedGemmPointers(**{**given, **fields}).problem()


SUMMED: dict[str, Any] = {"along": "k", "M": 2048, "K": 8192, "a_transposed": True}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"b_transposed": True}, None),
        ({"beta": 1.0, "dtype_c": "float32"}, None),
        (SUMMED, None),
        ({"dtype": "float32", "precision": "tf32", "b_transposed": True}, None),
        ({"along": "n"}, None),
        ({"along": "n", "N": 1403}, "rows of B at multiples of 2 bytes: TMA takes multiples of 16"),
        ({"groups": 1025}, "1025 groups: it takes 1024"),
        ({"a_transposed": True}, "along M it takes rows of A alone"),
        ({**SUMMED, "a_transposed": False}, "along K it takes A and B that do not lie along K"),
        ({**SUMMED, "dtype": "float32"}, "it does not group float32 along K"),
        ({"dtype": "float32"}, "it multiplies float32 in tf32, not in float32"),
        ({"M": 0}, "there is nothing to multiply"),
        ({"a_indices": 0, "c_indices": 0, "c_factors": 0, "a_rows": 1024}, None),
        ({"epilogue": "swiglu"}, None),
        ({"epilogue": "swiglu", "preactivation": 256, "a_indices": 0}, None),
        (
            {"epilogue": "relu", "dtype": "float8_e4m3fn", "b_transposed": True},
            "epilogue of float8_e4m3fn is not supported by this kernel",
        ),
        ({"c_factors": 0, "beta": 1.0}, "it adds no C to rows that have indices or factors"),
        (
            {"a_indices": 0, "dtype": "float32", "precision": "tf32", "b_transposed": True},
            "it gathers no rows that are rounded to TF32",
        ),
        ({"K": 2044}, "rows of A at multiples of 2 bytes: TMA takes multiples of 16"),
    ],
)
def test_what_it_takes(fields: dict[str, Any], reason: str | None) -> None:
    assert KERNEL.refuse(problem(**fields), ROW) == reason


def test_rings_buffers_and_the_table_fit() -> None:
    scaled = {"dtype": "float8_e4m3fn", "b_transposed": True, "a_scales": 256, "b_scales": 256}
    for tiles, p in (
        ((*GROUPED, GROUPED_PING_PONG), problem()),
        (GROUPED, problem(epilogue="gelu")),
        (GROUPED_E4M3, problem(**scaled)),
        (GROUPED_INDEXED, problem(a_indices=0)),
        (GROUPED_INDEXED_E4M3, problem(**scaled, c_indices=0)),
        (GROUPED_E4M3_BLOCKS, problem(**scaled, scale_block=(1, 128, 128))),
    ):
        assert KERNEL.tiles(p.spec, ROW) == tiles
        for tile in tiles:
            assert KERNEL.shared_bytes(p.spec, tile) * tile.blocks <= SHARED_BYTES


def test_which_tiles_store_a_result() -> None:
    """TMA stores whole chunks of 16 bytes; where C is most of what is moved, evict-first."""
    along_n = problem(along="n", N=1400)
    assert all(KERNEL.takes(along_n, t, ROW, H200) for t in GROUPED)
    ragged = problem(N=1404)
    assert {t.store for t in KERNEL.offered(ragged)} == {"rows"}
    assert not any(KERNEL.takes(ragged, t, ROW, H200) for t in GROUPED if t.store == "tma")
    of_weights = problem(groups=256, **{**SUMMED, "M": 7168, "N": 2048, "K": 4096})
    assert all(t.c_first == (t.store == "tma") for t in KERNEL.offered(of_weights))
    assert not any(t.c_first for t in KERNEL.offered(problem()))
    assert all(KERNEL.takes(problem(), t, ROW, H200) for t in KERNEL.offered(of_weights))


def test_which_tiles_take_pairs_of_columns() -> None:
    """Halves of a tile are whole panels of a B along N, and half ones of one along K."""
    along_n, along_k = (problem(epilogue="swiglu", b_transposed=x) for x in (False, True))
    assert {t.bn for t in KERNEL.offered(along_n)} == {256, 128}
    assert {t.bn for t in KERNEL.offered(along_k)} == {256, 192, 128}
    assert any(t.ping_pong for t in KERNEL.offered(along_k))
    for other in (problem(beta=1.0), problem(epilogue="reglu", b_transposed=True, preactivation=0)):
        assert not any(t.ping_pong for t in KERNEL.offered(other))
    (tile,) = (t for t in KERNEL.offered(along_k) if t.ping_pong)
    maps = KERNEL.tensor_maps(along_k, tile, H200)
    assert (maps["c_map"].extents, maps["c_map"].box) == ((704, 8192, 1, 1), (32, 64, 1, 1))
    assert (maps["b_map"].extents, maps["b_map"].box) == ((2048, 1408, 1, 64), (64, 96, 1, 1))


@given(sizes=st.lists(st.integers(0, 700), min_size=1, max_size=40), rest=st.integers(0, 300))
def test_no_groups_have_more_tiles_than_are_counted(sizes: list[int], rest: int) -> None:
    """The grid is of the most tiles that any offsets can give."""
    p = problem(groups=len(sizes), M=sum(sizes) + rest)
    for tile in GROUPED:
        rows = sum(-(-n // (tile.bm * tile.cluster)) for n in sizes)
        assert rows * -(-p.N // tile.bn) <= HopperGroupedGemm().count(p, tile)
    p = problem(along="n", groups=len(sizes), N=-(-(sum(sizes) + rest) // 8) * 8)
    begins = np.cumsum([0, *sizes[:-1]])
    for tile in GROUPED:
        columns = sum(
            -(-(int(b) % 8 + n) // tile.bn) for b, n in zip(begins, sizes, strict=True) if n
        )
        rows = -(-p.M // (tile.bm * tile.cluster))
        assert columns * rows <= HopperGroupedGemm().count(p, tile)


def test_it_is_launched_as_clusters_of_persistent_blocks() -> None:
    p = problem(groups=8, N=14336, K=4096)
    (tile,) = (t for t in GROUPED if t.cluster == 2 and t.bn == 256)
    config = KERNEL.config(p, tile, ROW, H200)
    assert (config.grid, config.cluster, config.block) == ((132, 1, 1), (2, 1, 1), (384, 1, 1))
    values = KERNEL.values(p, tile, H200)
    assert (values["matrix"], values["group_count"]) == (56, 8)
    assert (values["b_batch_step"], values["a_batch_step"], values["c_batch"]) == (1, 0, 0)
    maps = KERNEL.tensor_maps(p, tile, H200)
    assert maps["a_map"].extents == (4096, 8192, 1, 1)
    assert maps["b_map"].extents == (14336, 4096, 1, 8)
    assert maps["c_map"].extents == (14336, 8192, 1, 1)


def test_tiles_of_a_last_wave_are_cut_where_sums_are_long() -> None:
    """Words, which are left 0, for both consumers of a block, and a tile's sums for each."""
    long = {"groups": 8, "N": 4096, "K": 14336}
    p = problem(**long, b_transposed=True)
    tile = KERNEL.tile(p, ROW, H200)
    assert (tile.name, tile.tail_slices) == ("128x256-4-tma-tail", 16)
    launches = KERNEL.launches(p, tile, H200)
    assert (launches.zeroed_bytes, launches.workspace_bytes) == (1280, 1280 + 132 * 128 * 256 * 4)
    (launch,) = launches.kernels
    assert launch.workspace == {"origin": 0, "sums": 1280}
    assert KERNEL.constants(p.spec, tile, ROW)["TAIL_SLICES"] == 16
    for fields in (
        {"K": 4032},
        {"beta": 1.0},
        {"along": "n"},
        {"c_factors": 0},
        {"epilogue": "relu"},
        {"dtype": "float32", "precision": "tf32", "K": 4088, "b_transposed": True},
    ):
        whole = problem(**{**long, **fields})
        assert not any(t.tail_slices for t in KERNEL.offered(whole))
        assert KERNEL.launches(whole, KERNEL.tile(whole, ROW, H200), H200).workspace_bytes == 0
    assert not KERNEL.takes(problem(**long, beta=1.0), tile, ROW, H200)
    shorter = {**long, "K": 8120, "b_transposed": True}
    for M, cut in ((8192, False), (157, True)):  # where all tiles run at once, also shorter sums
        p = problem(**{**shorter, "groups": 2, "M": M})
        tile = KERNEL.tile(p, ROW, H200)
        assert {t.tail_slices for t in KERNEL.offered(p) if t.cluster == 1} >= {0, 16}
        assert bool(tile.tail_slices) == cut
        assert not cut or KERNEL.grid(p, tile, H200) == 132 * tile.blocks, "all blocks have a part"


def test_groups_along_n_have_a_matrix_of_a_each() -> None:
    p = problem(along="n", groups=8, M=14336, N=8192, K=4096)
    (tile,) = (t for t in GROUPED if t.cluster == 2 and t.bn == 256)
    values = KERNEL.values(p, tile, H200)
    assert (values["matrix"], values["group_count"], values["capacity"]) == (56, 8, 8192)
    assert (values["b_batch_step"], values["a_batch_step"], values["c_batch"]) == (0, 1, 0)
    maps = KERNEL.tensor_maps(p, tile, H200)
    assert maps["a_map"].extents == (4096, 14336, 1, 8)
    assert maps["b_map"].extents == (8192, 4096, 1, 1)
    assert maps["c_map"].extents == (8192, 14336, 1, 1)


EVEN, SKEWED = ((1024, 14336, 4096),) * 8, (600, 200, 2400, 1024, 96, 1800, 1500, 572)


@pytest.mark.parametrize(
    ("sizes", "fields", "reason"),
    [
        (((128, 256, 64), (0, 8, 8), (8, 0, 16), (300, 40, 0)), {}, None),
        (EVEN, {"beta": 1.0, "a_transposed": True, "dtype": "float16"}, None),
        (EVEN, {"dtype": "float32"}, "it takes lists of bfloat16 and float16, not of float32"),
        (EVEN * 129, {}, "1032 groups: it takes 1024"),
        (((64, 64, 0),), {}, "there is nothing to multiply"),
        (EVEN, {"alpha": 0.0}, "there is nothing to multiply"),
        (((2**31 - 1, 8, 8), (64, 8192, 2**23)), {}, "M = 2147483647: it takes less than 2**30"),
        (((128, 256, 60),), {}, "rows of A at multiples of 2 bytes: TMA takes multiples of 16"),
    ],
)
def test_which_lists_it_takes(sizes: Any, fields: dict[str, Any], reason: str | None) -> None:
    assert LISTS.refuse(listed(*sizes, **fields), ROW) == reason


def test_lists_of_a_class_with_larger_products_are_not_taken_as_known() -> None:
    known, larger = (listed((m, 8, 8), (64, 8192, 2**23)) for m in (2**30 - 1, 2**30))
    assert [LISTS.takes(p, GROUPED[0], ROW, H200) for p in (known, larger)] == [True, False]


def test_which_tiles_store_products_of_a_list() -> None:
    """TMA stores whole chunks of 16 bytes of every product; C is added by consumers that share."""
    assert {t.store for t in LISTS.offered(listed(*EVEN))} == {"rows", "tma"}
    rows = [14336] * 8 + [24]
    odd = listed(*EVEN, (8, 17, 64), stride_b_row=rows, stride_c_row=rows)
    assert {t.store for t in LISTS.offered(odd)} == {"rows"}
    assert any(t.ping_pong for t in LISTS.offered(listed(*EVEN)))
    assert not any(t.ping_pong for t in LISTS.offered(listed(*EVEN, beta=1.0)))


def test_the_tile_of_a_list_is_chosen_by_its_sizes() -> None:
    """Pairs of blocks would multiply an eighth more of these groups' rows in vain."""
    skewed = listed(*((m, 14336, 4096) for m in SKEWED))
    assert LISTS.tile(listed(*EVEN), ROW, H200).cluster == 2
    assert LISTS.tile(skewed, ROW, H200) == GROUPED[1]
    assert LISTS.work(skewed, GROUPED[1], H200).blocks == 67 * 56
    assert LISTS.work(skewed, GROUPED[0], H200).blocks == 72 * 56


def test_a_list_is_two_launches_over_maps_in_the_workspace() -> None:
    p = listed(*EVEN, (0, 0, 8))
    launches = LISTS.launches(p, GROUPED[0], H200)
    maps, product = launches.kernels
    assert launches.workspace_bytes == 9 * 3 * 128
    assert (maps.kernel.entry, product.kernel.entry) == ("gemm_list_maps_sm90", "gemm_sm90")
    assert maps.kernel.grid(p, GROUPED[0], H200) == 3
    assert product.kernel.grid(p, GROUPED[0], H200) == 132
    given = LISTS.tensor_maps(p, GROUPED[0], H200)
    assert {n: x.box[:2] for n, x in given.items()} == {
        "a_map": (64, 128),
        "b_map": (64, 32),
        "c_map": (64, 64),
        "residual_map": (64, 64),
    }
    for tile in (*GROUPED, GROUPED_PING_PONG):
        assert LISTS.shared_bytes(p.spec, tile) * tile.blocks <= SHARED_BYTES
