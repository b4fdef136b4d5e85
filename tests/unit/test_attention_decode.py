"""The kernel for few queries over many keys: its tiles, its grid, its workspace, what it refuses,
and where dispatch takes it."""

from __future__ import annotations

from typing import Any

import pytest
from kernelseam.contract import ArchRow, Device, DeviceLimits
from kernelseam.descriptors import Attention
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.dtypes import DType
from kernelseam.kernels import DECODE, DecodeTile

HALF = frozenset({DType.float16, DType.bfloat16})
NARROW = DecodeTile(HALF, 128, warps=4, rows=16, bn=16, stages=3, blocks=2, item_cost=5)
TALL = DecodeTile(HALF, 128, warps=4, rows=32, bn=16, stages=3, blocks=1, item_cost=5)
WIDE = DecodeTile(HALF, 256, warps=4, rows=16, bn=16, stages=3, blocks=1, item_cost=5)
FIELDS = {
    "batch": 2,
    "num_heads": 8,
    "kv_heads": 2,
    "S_q": 1,
    "S_k": 8192,
    "head_dim": 128,
    "dtype": "float16",
}


def row(*tiles: DecodeTile, shared: int = 227) -> ArchRow:
    found = {"attention_decode": tiles} if tiles else {}
    return ArchRow("fake1", 32, shared * 1024, 255, "fake.h", (), HALF, found)


def device(units: int = 132) -> Device:
    limits = DeviceLimits(
        units, bytes_per_second=4e12, operations_per_second={"float16": 1e15, "bfloat16": 1e15}
    )
    return Device("fake", 0, "fake1", "", limits)


def problem(**more: Any) -> AttentionProblem:
    made = Attention(**{**FIELDS, **more}).problem()
    assert isinstance(made, AttentionProblem)
    return made


@pytest.mark.parametrize(
    ("more", "tile"),
    [
        ({}, NARROW),
        ({"S_q": 4}, NARROW),  # 16 rows
        ({"S_q": 5}, TALL),  # 20 rows: once instead of twice
        ({"S_q": 9}, TALL),  # 36 rows: twice instead of three times
        ({"head_dim": 130}, WIDE),
        ({"head_dim": 64, "value_dim": 256}, WIDE),
    ],
)
def test_the_tile_reads_keys_least_often(more: dict[str, Any], tile: DecodeTile) -> None:
    """Where no item is cut."""
    found = DECODE.tile(problem(batch=132, **more), row(NARROW, TALL, WIDE), device())
    assert found == tile


def test_a_tile_that_does_not_fit_is_left_out() -> None:
    spec = problem().spec
    # queries, then for each warp three stages, two floats a row, where 16 rows begin, its stage
    size = 16 * 128 * 2 + 4 * (3 * 16 * 256 * 2 + 8 * 16 + 16 * 16 + 16)
    assert NARROW.shared_bytes(spec) == size
    assert DECODE.tiles(spec, row(NARROW, shared=102)) == (NARROW,)
    assert DECODE.tiles(spec, row(NARROW, shared=101)) == ()
    # 32 rows' sums take more than 16 keys and values
    assert TALL.shared_bytes(spec) == 8192 + 4 * (3 * 32 * 128 * 4 + 8 * 32 + 16 * 16 + 16)


@pytest.mark.parametrize(
    ("more", "units", "blocks"),
    [
        ({}, 132, 229),  # 4 items of 512 tiles and 5, nine a block
        ({}, 8, 16),  # two a unit
        ({"batch": 64}, 132, 264),
        ({"S_k": 0}, 132, 4),  # a short item has the places of a tile for each warp
        ({"S_k": 1}, 132, 4),
        ({"S_q": 9}, 132, 264),
    ],
)
def test_blocks_are_what_the_device_holds_or_fewer(
    more: dict[str, Any], units: int, blocks: int
) -> None:
    assert DECODE.grid(problem(**more), NARROW, device(units)) == blocks


def test_its_workspace_does_not_grow_with_the_lengths() -> None:
    found = [DECODE.launches(problem(batch=64, S_k=n), NARROW, device()) for n in (8192, 1 << 20)]
    for launches in found:
        (launch,) = launches.steps
        counters, sums = 264 * 4, 264 * 2 * 16 * 128 * 4
        assert launch.workspace == {"counters": 0, "sums": counters, "scales": counters + sums}  # type: ignore[union-attr]
        assert launches.zeroed_bytes == counters
        assert launches.workspace_bytes == counters + sums + 264 * 2 * 16 * 8


def test_variants_are_all_tiles_by_name() -> None:
    found = DECODE.variants(problem(S_q=5), row(NARROW, TALL, WIDE), device())
    assert list(found) == ["32x16-4w-3-1blocks", "16x16-4w-3-2blocks"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"batch_invariant": True}, "it cuts keys by the lengths of all entries, which"),
        ({"dtype": "float32"}, "it takes bfloat16 and float16, not float32"),
        ({"S_q": 33}, "S_q·heads of a group = 132: it takes 128 at most"),
        ({"head_dim": 257}, "no tile of fake1 takes float16 with head dims 257 and 257"),
        ({"S_q": 0}, "there are no queries"),
        ({"batch": 0}, "there are no queries"),
        ({"batch": 2**18, "S_k": 2**20}, "34362359808 tiles of keys: it takes less than 2^31"),
    ],
    ids=str,
)
def test_what_is_refused_is_named(more: dict[str, Any], words: str) -> None:
    assert words in str(DECODE.refuse(problem(**more), row(NARROW, TALL, WIDE)))


def test_an_arch_without_tiles_refuses() -> None:
    assert DECODE.refuse(problem(), row(NARROW)) is None
    assert DECODE.refuse(problem(), row()) == (
        "no tile of fake1 takes float16 with head dims 128 and 128"
    )


def test_nvidia_archs_with_asynchronous_copies_have_tiles() -> None:
    archs = pytest.importorskip("kernelseam_cuda.archs", reason="kernelseam-cuda is missing")
    for arch in archs.ROWS.values():
        for dim in (64, 96, 128, 192, 256):
            refused = DECODE.refuse(problem(head_dim=dim), arch)
            assert (refused is None) == (arch.arch != "sm_75"), arch.arch


PAGES = {"pages": 99, "page_size": 16, "table_width": 512, "block_table": 256, "kv_lengths": 256}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, None),
        ({"head_dim": 64, "causal": True, "sinks": 256, "dtype_out": "float32"}, None),
        ({"head_dim": 64, "value_dim": 128, "S_q": 8}, None),
        ({"head_dim": 96}, "head dims 96: it takes multiples of 64"),
        ({"head_dim": 192}, "no tile of % takes float16 with head dims 192 and 192"),
        ({"softcap": 5.0}, "softcap is not supported by this kernel"),
        ({"window": (64, 0)}, "window is not supported by this kernel"),
        ({"stride_k_row": 1089}, "rows at multiples of 2 bytes: it takes multiples of 16"),
        (dict.fromkeys(PAGES), "strided keys: it takes pages"),
    ],
    ids=str,
)
def test_amd_archs_have_lean_tiles(more: dict[str, Any], words: str | None) -> None:
    rocm = pytest.importorskip("kernelseam_rocm.archs", reason="kernelseam-rocm is missing")
    for arch in rocm.ROWS.values():
        reason = DECODE.refuse(problem(**{**PAGES, **more}), arch)
        if arch.arch == "gfx90a":
            assert reason is not None and reason.startswith("no tile of gfx90a takes float16")
        elif words is None or reason is None:
            assert reason is words, arch.arch
        else:
            assert words.replace("%", arch.arch) in reason
            assert arch.arch in reason
