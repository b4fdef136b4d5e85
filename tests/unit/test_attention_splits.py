"""How the keys of few queries are split over blocks: by the units of the device, the keys that are
seen, the spec."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kernelseam.contract import ArchRow, Device, DeviceLimits
from kernelseam.descriptors import Attention
from kernelseam.dtypes import DType
from kernelseam.kernels import KERNELS, AttentionTile

HALF = frozenset({DType.float16})
TILE = AttentionTile(HALF, 128, warps=4, rows=16, bn=64, stages=2)
HOST = KERNELS["attention"]
DECODE = {
    "batch": 2,
    "num_heads": 8,
    "kv_heads": 2,
    "S_q": 1,
    "S_k": 8192,
    "head_dim": 128,
    "dtype": "float16",
}


def device(units: int) -> Device:
    return Device("fake", 0, "fake1", "", DeviceLimits(compute_units=units))


def launched(
    units: int, tile: AttentionTile = TILE, shared: int = 227, **more: Any
) -> tuple[int, list[str], int]:
    """(splits, kernels, bytes of the workspace)"""
    problem = Attention(**{**DECODE, **more}).problem()
    row = ArchRow("fake1", 32, shared * 1024, 255, "fake.h", (), HALF, {"attention": (tile,)})
    chosen = HOST.tile(problem, row, device(units))
    result = HOST.launches(problem, chosen, device(units))
    blocks = HOST.grid(problem, chosen, device(units))
    assert result.steps[0].kernel is HOST and (
        chosen.splits == 1 or blocks <= units * tile.min_blocks
    )
    return chosen.splits, [s.kernel.entry for s in result.steps], result.workspace_bytes


@pytest.mark.parametrize(
    ("units", "more", "splits"),
    [
        # a group's heads share a block: 2 · 2 of them, and 132 // 4 = 33, but 8192 keys are 32
        # parts of 256
        (132, {}, 32),
        (100, {}, 25),
        (8, {}, 2),
        (7, {}, 1),  # more than half of the device is busy as it is
        (132, {"S_k": 1000}, 3),
        (132, {"S_k": 511}, 1),
        (132, {"window": (1023, 0)}, 4),  # of the keys that a query sees
        (4096, {"S_k": 1 << 20}, 64),
        (132, {"batch": 64}, 1),
        (132, {"kv_lengths": 0, "S_k": 4096}, 16),
        (132, {"batch_invariant": True}, 1),
        (132, {"batch": 0}, 1),
    ],
)
def test_as_many_as_the_device_runs_at_once(units: int, more: dict[str, Any], splits: int) -> None:
    actual, kernels, _ = launched(units, **more)
    assert actual == splits
    assert kernels == (
        ["attention_forward"] if splits == 1 else ["attention_forward", "merge_states"]
    )


def test_blocks_that_share_a_unit_count() -> None:
    assert launched(16)[0] == 4
    assert launched(16, replace(TILE, min_blocks=2))[0] == 8


def test_the_workspace_holds_each_parts_float32_result_and_lse() -> None:
    splits, _, size = launched(100)
    assert size == splits * 2 * 8 * (128 + 1) * 4


def test_no_split_where_a_float32_result_does_not_fit() -> None:
    """16-bit results of 64 rows fit beside the ring, float32 ones may not."""
    tile = replace(TILE, stages=1, bn=16)
    least = tile.shared_bytes(Attention(**DECODE).problem().spec)
    assert launched(132, tile, shared=-(-least // 1024))[0] == 1
    assert launched(132, tile)[0] > 1


@pytest.mark.parametrize(
    ("more", "rows"),
    [
        ({"S_q": 4096, "S_k": 4096}, 128),
        ({"S_q": 4096, "S_k": 4096, "causal": True}, 128),
        ({"S_q": 256, "S_k": 256, "causal": True}, 64),  # blocks meet fewer hidden keys
        ({"S_q": 129, "S_k": 4096}, 64),  # 192 rows for 256
        ({"S_q": 256, "S_k": 256, "causal": True, "batch_invariant": True}, 128),
    ],
)
def test_the_tile_is_that_of_the_least_predicted_time(more: dict[str, Any], rows: int) -> None:
    """A batch-invariant spec does not ask for extents."""
    tall, low = replace(TILE, rows=32, rate=0.5), replace(TILE, rate=0.45)
    row = ArchRow("fake1", 32, 227 << 10, 255, "fake.h", (), HALF, {"attention": (tall, low)})
    square = {**DECODE, "batch": 64, "kv_heads": 8, **more}
    assert HOST.tile(Attention(**square).problem(), row, device(132)).bm == rows
