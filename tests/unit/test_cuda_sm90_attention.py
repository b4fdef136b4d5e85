"""The kernel definition of Hopper's attention: what it takes, what it is launched with. Nothing
here needs a GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attention_problems import attention_problem as problem
from hopper import H200, ROW
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.dtypes import DType
from kernelseam.kernels.attention.merge import MERGE
from kernelseam.kernels.attention.ragged import expected_tiles
from kernelseam.tuned.classes import representative
from kernelseam_cuda import tensor_maps
from kernelseam_cuda.sm90.attention import HopperAttention
from kernelseam_cuda.sm90.attention_cost import LONE_CONSUMER, PAGES_AGAIN
from kernelseam_cuda.sm90.attention_few import (
    CLUSTER_PARTS,
    clusters_at_once,
    fits,
    shared_rows,
)
from kernelseam_cuda.sm90.attention_tiles import FEW_QUERIES

HALF = HopperAttention()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": DType.float32}, "it takes bfloat16 and float16, not float32"),
        ({"dtype_out": DType.float32}, "its result is of bfloat16, not float32"),
        ({"head_dim": 100, "value_dim": 80}, "head dims 100/80: it takes multiples of 8 up to 512"),
        ({"head_dim": 64, "value_dim": 520}, "head dims 64/520: it takes multiples of 8 up to 512"),
        ({"window": True, "prefix": True}, "a prefix beside a window"),
        (
            {"q_view": "packed"},
            "queries packed with keys strided: it takes both strided or both packed",
        ),
        (
            {"q_view": "pointers", "kv_view": "paged", "page_size": 16},
            "queries pointers with keys paged: it takes strided and packed ones",
        ),
        (
            {"kv_view": "paged", "page_size": 20, "head_dim": 64, "value_dim": 64},
            (
                "pages of 20 keys: it takes multiples of 8, and others in half precision with head "
                "dims of 97 to 256, without scores by element"
            ),
        ),
        ({"vector": 8}, "rows at multiples of 8 bytes: TMA takes multiples of 16"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_by_name(
    changes: dict[str, object], reason: str
) -> None:
    assert HALF.refuse(problem(**changes), ROW) == reason


def test_problems_are_refused_by_their_numbers() -> None:
    assert HALF.refuse(replace(problem(), scale=-1.0), ROW) == "scale = -1.0: it takes more than 0"
    for nothing in ({"S_q": 0}, {"S_k": 0}, {"batch": 0}, {"heads": 0, "kv_heads": 0}):
        assert HALF.refuse(problem(**nothing), ROW) == "there is nothing to multiply"
    assert (
        HALF.refuse(problem(S_k=2**30), ROW) == "S_q + S_k = 1073745920: it takes less than 2**30"
    )


DIMS = (*range(8, 257, 8), *range(264, 513, 56))


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": True, "softcap": True}, {"sinks": True, "lengths": True}],
    ids=["full", "causal", "window-softcap", "sinks-lengths"],
)
def test_every_head_dim_has_a_tile_whose_maps_the_hardware_takes(options: dict) -> None:
    pairs = [*((d, d) for d in DIMS), *((d, max(264 - d, 8)) for d in DIMS)]
    for dims in (*HopperAttention().widths, *pairs):
        p = problem(head_dim=dims[0], value_dim=dims[1], **options)
        assert HALF.refuse(p, ROW) is None, dims
        tile = HALF.tile(p, ROW, H200)
        assert tile.head_dim >= dims[0] and tile.value_dim >= dims[1], dims
        assert tile.shared_bytes <= ROW.shared_bytes_per_block, dims
        for m in HALF.tensor_maps(p, tile, H200).values():
            assert tensor_maps.refuse(m, 16) is None, dims


def test_tiles_of_few_keys_are_not_for_batch_invariant_specs() -> None:
    few = problem(S_q=512, S_k=512, head_dim=64, value_dim=64, batch=16)
    assert HALF.tile(few, ROW, H200).short
    assert not HALF.tile(problem(head_dim=64, value_dim=64), ROW, H200).short
    invariant = replace(few, spec=replace(few.spec, batch_invariant=True))
    assert not HALF.tile(invariant, ROW, H200).short


def test_maps_walk_the_operands() -> None:
    p = problem(kv_heads=4, S_k=1000)
    maps = HALF.tensor_maps(p, HALF.tile(p, ROW, H200), H200)
    assert (maps["q_map"].operand, maps["q_map"].extents, maps["q_map"].box) == (
        "q",
        (128, 4096, 16, 4),
        (64, 64, 1, 1),
    )
    assert (maps["k_map"].extents, maps["k_map"].box) == ((128, 1000, 4, 4), (64, 128, 1, 1))
    assert maps["k_map"].strides == (1, 512, 128, 512_000)
    assert (maps["out_map"].operand, maps["out_map"].box) == ("out", (64, 16, 1, 1))
    packed = problem(q_view="packed", kv_view="packed")
    maps = HALF.tensor_maps(packed, HALF.tile(packed, ROW, H200), H200)
    assert maps["v_map"].extents == (128, 16384, 16, 1)


def paged_problem(page_size: int = 16, **spec: object) -> AttentionProblem:
    return problem(1000, 1000, 16, 4, page_size=page_size, kv_view="paged", lengths=True, **spec)


@pytest.mark.parametrize(
    ("page_size", "rows"), [(8, 8), (16, 16), (24, 8), (48, 16), (256, 16), (1024, 16)]
)
def test_boxes_of_pages_lie_in_one_page(page_size: int, rows: int) -> None:
    """Eight rows, all columns, a head and as many eights as a page and 16 rows share."""
    p = paged_problem(page_size)
    tile, pages = HALF.tile(p, ROW, H200), 4 * -(-1000 // page_size)
    assert HALF.refuse(p, ROW) is None and tile.page_rows == rows
    maps = HALF.tensor_maps(p, tile, H200)
    for name in ("k_map", "v_map"):
        assert maps[name].extents == (64, 8, 2, 4, pages * page_size // 8)
        assert maps[name].box == (64, 8, 2, 1, rows // 8)
        assert maps[name].strides == (1, 512, 64, 128, 4096)
        assert tensor_maps.refuse(maps[name], 16) is None
    assert HALF.values(p, tile, H200)["page_rows"] == page_size


@pytest.mark.parametrize("page_size", [1, 3, 12, 20])
@pytest.mark.parametrize("dims", [(104, 104), (128, 128), (64, 128), (256, 256)])
def test_rows_of_pages_without_boxes_are_copied(page_size: int, dims: tuple[int, int]) -> None:
    """Their places are kept for the ring's blocks and two more; maps of k and v are not used."""
    p = paged_problem(page_size, head_dim=dims[0], value_dim=dims[1])
    assert HALF.refuse(p, ROW) is None
    sloped = replace(p, spec=replace(p.spec, alibi=True))
    assert str(HALF.refuse(sloped, ROW)).startswith(
        f"pages of {page_size} keys: it takes multiples"
    )
    boxed = HALF.tiles_of(paged_problem(16, head_dim=dims[0], value_dim=dims[1]), ROW)
    copied = HALF.tiles_of(p, ROW)
    assert [replace(t, page_rows=16) for t in copied] == list(boxed)
    for tile in copied:
        assert tile.page_rows == 1 and tile.fits
        assert tile.control_bytes >= 1024 + 4 * (tile.stages + 2) * tile.bn
        constants = HALF.constants(p.spec, tile, ROW)
        assert (constants["PAGE_ROWS"], constants["K_TOGETHER"], constants["V_TOGETHER"]) == (
            *(1, False),
            False,
        )
        maps = HALF.tensor_maps(p, tile, H200)
        assert maps["k_map"] == maps["v_map"] == maps["q_map"]


def test_copied_rows_are_dearer_than_boxes() -> None:
    boxes, copies = paged_problem(16), paged_problem(1)
    work = [HALF.work(p, HALF.tile(p, ROW, H200), H200) for p in (boxes, copies)]
    assert work[1].rate == pytest.approx(0.72 * work[0].rate)


@pytest.mark.parametrize(("dim", "columns"), [(64, 64), (96, 96)])
def test_pages_of_one_panel_or_of_part_of_one_come_panel_by_panel(dim: int, columns: int) -> None:
    """A second panel's last columns would be the next head's, were they not beyond the map."""
    p = paged_problem(head_dim=dim, value_dim=dim)
    maps = HALF.tensor_maps(p, HALF.tile(p, ROW, H200), H200)
    assert (maps["k_map"].extents[0], maps["k_map"].box) == (columns, (64, 8, 1, 2))


@pytest.mark.parametrize(
    ("queries", "total", "shared"),
    [
        ((5,) * 64, 320, 4),
        ((2048, *(1,) * 63), 2111, 4),  # a prefill beside single queries
        ((512,) * 4 + (1,) * 128, 2176, 4),
        ((2048,) * 8, 16384, 1),  # whole tiles either way
        (tuple(range(32, 2049, 32)), 66560, 1),  # long ones on average: TMA stores their results
    ],
)
def test_heads_share_tiles_where_sequences_have_few_queries_on_average(
    queries: tuple[int, ...], total: int, shared: int
) -> None:
    """The host knows the longest sequence and the total."""
    p = problem(max(queries), 4096, 16, 4, len(queries), q_view="packed", kv_view="paged")
    p = replace(p, total_q=total, spec=replace(p.spec, lengths=True, causal=True))
    tile = HALF.tile(p, ROW, H200)
    assert sum(queries) == total and tile.group_heads == shared
    assert HALF.tile(representative(p), ROW, H200) == tile, "the class decides, by its share"
    found = sum(-(-n * shared // tile.bm) for n in queries) * 16 // shared
    assert expected_tiles(p, tile.bm, shared) == pytest.approx(
        found, rel=0.1, abs=16 * len(queries) / 2
    )


@pytest.mark.parametrize(
    ("queries", "heads"),
    [(257, 8), (300, 8), (306, 1), (513, 1)],  # 17, 19 and 20 tiles of 24; 33 of 40
)
def test_heads_share_more_queries_where_they_save_a_fifth_of_the_tiles(
    queries: int, heads: int
) -> None:
    p = problem(queries, 2164, 64, 8, 3, causal=True)
    assert shared_rows(p, HALF.tiles(p.spec, ROW)[0]).group_heads == heads


def test_a_short_sequence_has_a_tile() -> None:
    """15 × 8 queries and 3 × 1, four heads a group: half a tile each and what they have is less."""
    p = problem(8, 43, 32, 8, 18, q_view="packed", kv_view="paged")
    p = replace(p, total_q=123, spec=replace(p.spec, lengths=True, causal=True))
    assert expected_tiles(p, 128, 4) == 18 * 8
    assert expected_tiles(replace(p, total_q=12), 128, 4) == 12 * 8, "six have no queries"


def test_small_tiles_are_for_problems_of_few_tiles_that_heads_share() -> None:
    """60 × 17 queries, eight heads a group: 360 tiles of 64 rows, 960 where heads had tiles of
    their own (H200: 18.6 µs by 128 rows, 13.6 by 64)."""
    p = problem(17, 125, 16, 2, 60, causal=True)
    beside = [t for t in HALF.variants(p, ROW, PRODUCT).values() if t.blocks == 2]
    assert {t.bm for t in beside} == {64} and {t.group_heads for t in beside} == {1, 8}
    many = replace(p, batch=120)
    assert all(t.blocks == 1 for t in HALF.variants(many, ROW, PRODUCT).values())


def test_small_tiles_are_for_sequences_that_are_short_on_average() -> None:
    """138 sequences of up to 38 rows, 1,228 in all, of five heads to a KV head: 45 rows of each."""
    p = problem(38, 38, 20, 4, 138, 256, q_view="packed", kv_view="packed")
    short, long = (replace(p, total_q=n, total_k=n) for n in (1228, 2400))
    found, none = (
        {t.group_heads for t in HALF.variants(x, ROW, PRODUCT).values() if t.bm == 64}
        for x in (short, long)
    )
    assert (found, none) == ({1, 5}, set())


def test_pools_whose_rows_are_no_matrix_are_refused() -> None:
    p = paged_problem()
    page, head, row = p.k_strides
    beside = replace(p, k_strides=(2 * page, head, row), v_strides=(2 * page, head, row))
    assert HALF.refuse(beside, ROW) is None, "each page of k with one of v behind it"
    assert [HALF.refuse(representative(x), ROW) for x in (p, beside)] == [None, None]
    odd = replace(p, k_strides=(page + 64, head, row), v_strides=(page + 64, head, row))
    assert HALF.refuse(representative(odd), ROW) is not None, "the class decides as it would"
    assert HALF.values(beside, HALF.tile(beside, ROW, H200), H200)["page_rows"] == 32
    uneven = (page + 3 * row, head, row)
    uneven_pages = replace(p, k_strides=uneven, v_strides=uneven)
    assert HALF.refuse(uneven_pages, ROW) is None, "no boxes: rows are copied"
    assert HALF.tile(uneven_pages, ROW, H200).page_rows == 1
    narrow = paged_problem(head_dim=64, value_dim=64)
    uneven = (narrow.k_strides[0] + narrow.k_strides[2], *narrow.k_strides[1:])
    assert (
        HALF.refuse(replace(narrow, k_strides=uneven, v_strides=uneven), ROW)
        == "pages of k and v lie 17 rows apart: it takes multiples of 8, and others in half "
        "precision with head dims of 97 to 256, without scores by element"
    )
    assert (
        HALF.refuse(replace(p, k_strides=(2 * page, head, row)), ROW)
        == "pages of k and of v lie different numbers of rows apart"
    )
    assert (
        HALF.refuse(replace(p, k_strides=(page + 64, head, row)), ROW)
        == "pages of k lie 8256 elements apart, their rows 512: it takes whole rows from a page "
        "to the next"
    )
    assert (
        HALF.refuse(replace(p, k_strides=(0, head, row)), ROW)
        == "pages of k lie 0 elements apart, their rows 512: it takes whole rows from a page to "
        "the next"
    )
    assert (
        HALF.refuse(replace(p, pages=2**27 + 1), ROW)
        == "pages of k span 2147483664 rows: it takes less than 2^31"
    )


@pytest.mark.parametrize(("batch", "S"), [(1, 64), (3, 700), (4, 4096), (64, 512)])
def test_sections_cover_every_tile_once(batch: int, S: int) -> None:
    """The walk of tiles.h, in Python: tiles of a section go longest first, and the last section
    takes the rest."""
    p = problem(S_q=S, S_k=S, batch=batch, causal=True)
    tile = HALF.tile(p, ROW, H200)
    v = HALF.values(p, tile, H200)
    heads, q_tiles = batch * p.num_heads, v["q_tiles"]
    assert v["total"] == heads * q_tiles == heads * -(-S // tile.bm)
    seen = []
    for t in range(v["total"]):
        fore = heads - v["last_section"]
        last = t >= fore * q_tiles
        first = fore if last else t // (v["section"] * q_tiles) * v["section"]
        width = v["last_section"] if last else min(v["section"], fore - first)
        turn, index = divmod(t - first * q_tiles, width)
        seen.append((first + index, q_tiles - 1 - turn))
    assert sorted(seen) == [(h, m) for h in range(heads) for m in range(q_tiles)]


@pytest.mark.parametrize(
    ("dim", "S", "heads", "together"),
    [
        (256, 16384, 8, 4),
        (256, 4096, 32, 16),
        (256, 1024, 128, 32),
        (64, 16384, 32, 8),
        (64, 1024, 512, 128),
    ],
)
def test_blocks_that_ask_late_end_together_with_fewer_heads(
    dim: int, S: int, heads: int, together: int
) -> None:
    """Of 512 tiles, and 32 MiB of keys and values or 16 heads."""
    p = problem(S, S, heads, heads, 1, head_dim=dim, value_dim=dim, causal=True)
    tile = HALF.tile(p, ROW, H200)
    assert tile.late and HALF.values(p, tile, H200)["last_section"] == together


def test_tiles_of_one_length_are_not_asked_for_late() -> None:
    for dim in (64, 256):
        for options in ({}, {"window": True}, {"lengths": True}):
            p = problem(head_dim=dim, value_dim=dim, **options)
            assert not any(t.late for t in HALF.tiles(p.spec, ROW))


@pytest.mark.parametrize("cap", [1e-3, 1.0, 30.0, 50.0, 200.0])
@pytest.mark.parametrize("scale", [64**-0.5, 256**-0.5, 1.0])
@pytest.mark.parametrize(
    ("bound", "up_to", "coefficients"),
    [("least", 0.19, ("d0", "d1", "d2")), ("limit", 0.6, ("c0", "c1", "c2", "c3", "c4"))],
)
def test_small_scores_are_capped_by_a_polynomial(
    cap: float, scale: float, bound: str, up_to: float, coefficients: tuple[str, ...]
) -> None:
    """In float32, as the kernel has it; against tanh to a few of its roundings."""
    p = replace(problem(head_dim=64, value_dim=64, softcap=True), scale=scale, softcap=cap)
    v = HALF.values(p, HALF.tile(p, ROW, H200), H200)
    x = np.linspace(-1, 1, 2001).astype(np.float32) * np.float32(v[f"small_cap_{bound}"])
    assert x.max() == pytest.approx(up_to * cap / scale)
    y = np.float32(0)
    for name in reversed(coefficients):
        y = y * (x * x) + np.float32(v[f"small_cap_{name}"])
    want = math.log2(math.e) * cap * np.tanh(x.astype(np.float64) * scale / cap)
    assert np.allclose(x * y, want, rtol=4e-7, atol=0)


@pytest.mark.parametrize("cap", [1e-12, 1e9])
def test_caps_whose_powers_leave_float32_have_no_polynomial(cap: float) -> None:
    p = replace(problem(softcap=True), softcap=cap)
    v = HALF.values(p, HALF.tile(p, ROW, H200), H200)
    names = ("least", "d0", "d1", "d2", "limit", "c0", "c1", "c2", "c3", "c4")
    assert all(v[f"small_cap_{n}"] == 0 for n in names)


def test_the_counter_is_first_in_a_workspace_that_is_zero_before_the_first_launch() -> None:
    p = problem(causal=True)
    launches = HALF.launches(p, HALF.tile(p, ROW, H200), H200)
    assert (launches.workspace_bytes, launches.zeroed_bytes, launches.steps[0].workspace) == (
        16,
        16,
        {"counter": 0},
    )
    full = problem()
    assert HALF.launches(full, HALF.tile(full, ROW, H200), H200).workspace_bytes == 0


def test_blocks_are_as_many_as_multiprocessors_and_no_more_than_tiles() -> None:
    big, small = problem(), problem(S_q=100, S_k=200, batch=1)
    assert HALF.grid(big, HALF.tile(big, ROW, H200), H200) == 132
    for tile in HALF.variants(small, ROW, H200).values():
        blocks = 16 * -(-100 // tile.bm) * tile.parts
        assert HALF.grid(small, tile, H200) == min(blocks, 132)


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({"S_q": 1024, "S_k": 1024}, {64, 128, 192, 256}),  # 256 tiles of 64 rows, 64 of 256
        ({"S_q": 1024, "S_k": 1024, "batch": 2}, {64, 128, 192, 256}),  # 512, two a multiprocessor
        ({"S_q": 1024, "S_k": 1024, "batch": 3}, {192, 256}),
    ],
)
def test_small_problems_have_tiles_of_fewer_rows(changes: dict[str, Any], rows: set[int]) -> None:
    p = problem(**{"batch": 1, "head_dim": 64, "value_dim": 64, "causal": True, **changes})
    assert {t.bm for t in HALF.variants(p, ROW, PRODUCT).values()} == rows
    if p.batch == 1:
        assert HALF.tile(p, ROW, PRODUCT).bm < 256


def test_two_consumers_share_the_rows_of_head_dims_above_256() -> None:
    p = problem(head_dim=512, value_dim=512, causal=True)
    tile = HALF.tile(p, ROW, H200)
    assert (tile.bm, tile.groups, tile.value_parts) == (64, 2, 2)
    assert HALF.constants(p.spec, tile, ROW)["VALUE_PARTS"] == 2
    assert HALF.grid(p, tile, H200) == 132 and HALF.threads(tile, ROW) == 384
    # A box of pages brings all panels of V only where each part has whole ones.
    for dims, whole in (((512, 512), True), ((320, 320), False), ((384, 384), True)):
        paged = replace(p.spec, head_dim=dims[0], value_dim=dims[1], kv_view="paged", lengths=True)
        constants = HALF.constants(paged, HALF.tiles(paged, ROW)[0], ROW)
        assert (constants["K_TOGETHER"], constants["V_TOGETHER"]) == (True, whole)


def test_launches_may_start_while_the_one_before_ends() -> None:
    """That of every tile, and the merge of parts."""
    p = few()
    for tile in HALF.variants(p, ROW, PRODUCT).values():
        steps = HALF.launches(p, tile, PRODUCT).steps
        configs = [s.kernel.config(s.problem, s.tile, ROW, PRODUCT) for s in steps]
        assert all(c.programmatic and c.refuse(ROW) is None for c in configs)
        assert len(configs) == 1 + (tile.parts > 1 and not tile.in_cluster)


# ---- few queries: heads that share keys share tiles, keys are cut into parts


PRODUCT = ROW.product
"""With rates, by which parts are chosen."""


def few(**changes: Any) -> Any:
    """64 queries of 32 heads, four of which share keys, at the end of 4096 keys."""
    return problem(**{"S_q": 64, "batch": 1, "heads": 32, "kv_heads": 8, "causal": True, **changes})


@pytest.mark.parametrize(
    ("changes", "rows", "heads", "parts"),
    [
        ({}, 128, 4, 8),  # 8 × 2 tiles
        ({"S_q": 16}, 64, 4, 16),  # 8 × 1
        ({"S_q": 9, "batch": 2}, 64, 4, 8),
        ({"S_q": 64, "kv_heads": 32}, 64, 1, 4),
        ({"S_q": 64, "kv_heads": 32, "head_dim": 64, "value_dim": 64}, 64, 1, 4),
        ({"S_q": 100, "kv_heads": 32, "head_dim": 64, "value_dim": 64}, 128, 1, 4),
        ({"S_q": 12, "heads": 40}, 64, 5, 16),  # twelve queries of five heads: 8 × 1
        ({"S_q": 50, "heads": 40}, 128, 5, 8),  # 25 in a tile: 8 × 2
        ({"S_q": 18, "heads": 56}, 128, 7, 16),
        ({"S_q": 64, "heads": 30, "kv_heads": 5}, 128, 2, 8),  # pairs of six heads: 15 × 1, else 20
        ({"S_q": 1, "heads": 71, "kv_heads": 1}, 128, 71, 16),
        ({"S_q": 4, "heads": 96, "kv_heads": 1}, 64, 32, 16),  # thirds: 3 × 2; halves: 2 × 4
        ({"S_q": 64, "S_k": 1024}, 128, 4, 4),  # no part of less than 256 keys
        ({"S_q": 64, "S_k": 300}, 128, 4, 1),
        ({"S_q": 64, "batch": 16}, 128, 4, 1),
    ],
)
def test_tiles_for_few_queries(changes: dict[str, Any], rows: int, heads: int, parts: int) -> None:
    p = few(**changes)
    assert HALF.refuse(p, ROW) is None
    tiles = HALF.variants(p, ROW, PRODUCT).values()
    assert (rows, heads, parts) in {(t.bm, t.group_heads, t.parts) for t in tiles}
    assert max(t.parts for t in tiles) >= parts
    assert max(t.group_heads for t in tiles) == heads
    assert all(t.bm >= 64 and (not t.most_rows or fits(p, t)) for t in tiles)


def test_parts_are_for_tiles_that_do_not_fill_the_device() -> None:
    chosen = HALF.tile(few(), ROW, PRODUCT)
    assert chosen.parts > 1
    many = few(S_q=4096)
    assert {t.parts for t in HALF.variants(many, ROW, PRODUCT).values()} == {1}
    assert {t.group_heads for t in HALF.variants(many, ROW, PRODUCT).values()} == {1}


@pytest.mark.parametrize(
    ("changes", "tiles", "parts"),
    [
        ({}, 72, {3, 5, 9}),  # waves of a whole tile: 1, 2/3, 3/5, 5/9
        ({"kv_heads": 11, "heads": 88}, 99, {4}),  # 3/4, 5 % less of which no more have
        ({"batch": 2}, 144, {2, 3, 4, 6, 10}),
        ({"kv_heads": 7, "heads": 56}, 63, {2}),  # less than half: as many as fill the device
        ({"S_k": 500}, 72, set()),  # tiles differ by what the causal mask hides
    ],
)
def test_parts_even_the_last_wave(changes: dict[str, Any], tiles: int, parts: set[int]) -> None:
    p = few(**{"S_q": 129, "heads": 64, "S_k": 20599, "head_dim": 256, "value_dim": 256, **changes})
    found = [
        t for t in HALF.variants(p, ROW, PRODUCT).values() if t.bm == 128 and t.group_heads > 1
    ]
    assert {expected_tiles(p, t.bm, t.group_heads) for t in found} == {tiles}
    assert {t.parts for t in found if not t.in_cluster} - {1} == parts


def test_a_batch_invariant_spec_has_one_tile() -> None:
    p = few()
    p = replace(p, spec=replace(p.spec, batch_invariant=True))
    tile = HALF.tile(p, ROW, PRODUCT)
    assert (tile.group_heads, tile.parts) == (1, 1)
    assert list(HALF.variants(p, ROW, PRODUCT)) == [tile.name]


def test_parts_and_their_merge() -> None:
    """A counter, then, from a line of the L2 cache on, results and log-sum-exps of eight parts in
    float32, then their merge."""
    p = few()
    tile = replace(HALF.tiles(p.spec, ROW)[0].sharing(4), parts=8)
    launches = HALF.launches(p, tile, PRODUCT)
    part, merge = launches.kernels
    outs, lses = 8 * 32 * 64 * 128 * 4, 8 * 32 * 64 * 4
    assert part.workspace == {"out": 128, "lse": 128 + outs, "counter": 0}
    assert merge.kernel is MERGE and merge.workspace == {"outs": 128, "lses": 128 + outs}
    assert launches.workspace_bytes == 128 + outs + lses and launches.zeroed_bytes == 16
    assert part.problem.spec.out is DType.float32 and part.problem.spec.lse
    assert HALF.grid(part.problem, part.tile, PRODUCT) == 128
    values = HALF.values(part.problem, part.tile, PRODUCT)
    assert (values["out_part"], values["lse_part"]) == (32 * 64 * 128, 32 * 64)
    assert (values["q_tiles"], values["total"], values["parts"]) == (2, 16, 8)
    assert (values["tile_heads"], values["tile_head_group"]) == (8, 1)


def test_parts_of_a_cluster_are_one_launch() -> None:
    """A block for each part of each tile, all of a tile in a cluster; no workspace, no counter,
    and the results are those of the problem."""
    p = few()
    tile = replace(HALF.tiles(p.spec, ROW)[0].sharing(4), parts=6, in_cluster=True)
    launches = HALF.launches(p, tile, PRODUCT)
    (only,) = launches.kernels
    assert only.problem is p and not only.workspace
    assert (launches.workspace_bytes, launches.zeroed_bytes) == (0, 0)
    config = HALF.config(p, tile, ROW, PRODUCT)
    assert (config.grid, config.cluster) == ((16 * 6, 1, 1), (6, 1, 1))
    assert config.refuse(ROW) is None
    constants = HALF.constants(p.spec, tile, ROW)
    assert constants["IN_PARTS"] and constants["IN_CLUSTER"] and not constants["DYNAMIC"]
    assert HALF.constants(p.spec, replace(tile, in_cluster=False), ROW)["DYNAMIC"]
    assert HALF.values(p, tile, PRODUCT)["parts"] == 6


@pytest.mark.parametrize(
    ("changes", "clusters"),
    [
        ({}, {(128, 4, 6), (128, 4, 4), (64, 1, 3), (64, 1, 2), (128, 1, 3)}),
        ({"S_q": 9, "batch": 2}, {(64, 4, 6), (64, 4, 4)}),
        ({"S_q": 16}, {(64, 4, 8), (64, 4, 6)}),
        ({"S_q": 64, "S_k": 300}, {(128, 4, 2)}),  # no part of less than 128 keys
        ({"S_q": 8}, set()),
        ({"S_q": 64, "batch": 16}, set()),  # the device is full
        ({"S_q": 64, "kv_heads": 32, "head_dim": 512, "value_dim": 512}, set()),
    ],
)
def test_clusters_are_no_more_than_run_at_once(
    changes: dict[str, Any], clusters: set[tuple[int, int, int]]
) -> None:
    p = few(**changes)
    offered = [t for t in HALF.variants(p, ROW, PRODUCT).values() if t.in_cluster]
    assert clusters <= {(t.bm, t.group_heads, t.parts) for t in offered}
    assert bool(clusters) == bool(offered)
    for t in offered:
        assert HALF.grid(p, t, PRODUCT) // t.parts <= clusters_at_once(t.parts, 132)


@pytest.mark.parametrize("units", [132, 114, 78])
def test_clusters_at_once_whichever_multiprocessors_a_card_has(units: int) -> None:
    """Of all ways in which eight GPCs of up to nine pairs have so many, the one that runs the
    fewest clusters still runs these, and few more."""
    for blocks in CLUSTER_PARTS:
        fewest = {0: 0}
        for _ in range(8):
            grown: dict[int, int] = {}
            for pairs, clusters in fewest.items():
                for own in range(10):
                    sum_of = clusters + 2 * own // blocks
                    grown[pairs + own] = min(grown.get(pairs + own, sum_of), sum_of)
            fewest = grown
        assert 0.6 * fewest[units // 2] <= clusters_at_once(blocks, units) <= fewest[units // 2]


def test_blocks_that_share_a_multiprocessor() -> None:
    """Two fit in shared memory; the grid has two a multiprocessor, and more tiles are
    counted as whole waves."""
    for tile in (t for t in FEW_QUERIES if t.blocks == 2):
        assert 2 * (tile.shared_bytes + 1024) <= 228 * 1024
        p = few(head_dim=tile.head_dim, value_dim=tile.value_dim)
        assert HALF.constants(p.spec, tile, ROW)["BLOCKS"] == 2
        for heads, blocks, counted in ((100, 100, 100), (200, 200, 264), (300, 264, 528)):
            some = few(S_k=64, heads=heads, kv_heads=heads, head_dim=tile.head_dim)
            assert HALF.grid(some, tile, PRODUCT) == blocks
            assert HALF.work(some, tile, PRODUCT).blocks == counted


def test_boxes_have_all_heads_of_a_group() -> None:
    """Rows of a box: the four heads of one query after the other, with their strides."""
    p = few()
    q = HALF.tensor_maps(p, HALF.tiles(p.spec, ROW)[0].sharing(4), PRODUCT)["q_map"]
    row, head = p.q_strides[2], p.q_strides[1]
    assert q.extents == (128, 4, 64, 8, 1) and q.box == (64, 4, 16, 1, 1)
    assert q.strides == (1, head, row, 4 * head, p.q_strides[0])
    assert tensor_maps.refuse(q, 16) is None


@pytest.mark.parametrize(
    ("heads", "queries", "boxes"),
    [
        (2, 64, 2),
        (3, 42, 1),
        (5, 25, 1),
        (7, 18, 1),
        (12, 10, 1),
        (40, 3, 1),
        (64, 2, 2),
        (71, 1, 1),
    ],
)
def test_tiles_have_whole_queries(heads: int, queries: int, boxes: int) -> None:
    """Of 128 rows: the others are spare, and no tile counts them. A box is a consumer's, where its
    rows are whole queries, too."""
    p = few(S_q=2 * queries + 1, heads=2 * heads, kv_heads=2)
    tile = HALF.tiles(p.spec, ROW)[0].sharing(heads)
    assert (tile.bm, tile.rows) == (128, queries * heads)
    assert HALF.values(p, tile, PRODUCT)["q_tiles"] == 3
    q = HALF.tensor_maps(p, tile, PRODUCT)["q_map"]
    assert q.box == (64, heads, queries // boxes, 1, 1)
    assert tensor_maps.refuse(q, 16) is None


def test_work_is_that_of_the_parts() -> None:
    p = few(causal=False)
    tile = replace(HALF.tiles(p.spec, ROW)[0].sharing(4), parts=8)
    whole = HALF.work(p, replace(tile, parts=1), PRODUCT)
    part = HALF.work(p, tile, PRODUCT)
    assert part.blocks == 8 * whole.blocks
    assert part.operations == pytest.approx(whole.operations / 8)


def test_consumers_without_rows_cost_a_part_of_a_step() -> None:
    two = replace(HALF.tiles(few(causal=False).spec, ROW)[0], group_heads=4, parts=1)
    assert two.bm == 128
    full, half = (
        HALF.work(few(causal=False, S_q=n, S_k=4096), two, PRODUCT).operations for n in (32, 16)
    )
    assert half == pytest.approx(LONE_CONSUMER * full)


def test_later_tiles_over_pages_wait_as_long_as_the_first() -> None:
    p = paged_problem(16)
    p = replace(p, batch=p.batch * PRODUCT.limits.compute_units)
    work = HALF.work(p, HALF.tile(p, ROW, H200), PRODUCT)
    waves = -(-work.blocks // PRODUCT.limits.compute_units)
    assert waves > 1
    assert waves * work.block_seconds == pytest.approx(PAGES_AGAIN * (waves - 1) * work.start)
