"""Heads whose longest causal blocks start together: as many as fill the device twice and a cache
keeps; and which archs have tiles whose keys and values share a stage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kernelseam.contract import Device, DeviceLimits
from kernelseam.descriptors import Attention
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.dtypes import DType
from kernelseam.kernels import KERNELS, AttentionTile
from kernelseam_cuda.archs import row

HALF = frozenset({DType.float16})
TALL = AttentionTile(HALF, 256, 4, 32, 64, 1, min_blocks=2, shared_stage=True, sections=True)
"""128 rows a block, two blocks on a unit."""
H200 = Device("fake", 0, "fake1", "", DeviceLimits(compute_units=132))


def problem(batch: int, heads: int, S: int, dim: int, **more: Any) -> AttentionProblem:
    return Attention(
        batch=batch,
        num_heads=heads,
        S_q=S,
        S_k=S,
        head_dim=dim,
        **{"dtype": "float16", "causal": True, **more},
    ).problem()


@pytest.mark.parametrize(
    ("shape", "more", "together", "matrices"),
    [
        # 2 · 264 blocks of 8 a head would be 66 heads, 32 MiB are 64 heads' keys and values
        ((16, 16, 1024, 128), {}, 64, 256),
        ((4, 16, 4096, 128), {}, 16, 64),
        ((1, 16, 16384, 128), {}, 4, 16),
        ((1, 16, 1 << 18, 128), {}, 1, 16),  # one head's are more than that
        # four heads share theirs, so that 64 would fit: 17, …, 17 and 9
        ((4, 32, 4096, 128), {"kv_heads": 8}, 17, 128),
        # after 33 the last section would have 1 of 34: 22 and 12
        ((17, 2, 2048, 64), {}, 22, 34),
        ((1, 1, 128, 128), {}, 512, 1),
        ((0, 8, 128, 128), {}, 512, 0),
        ((2, 8, 0, 128), {}, 528, 16),
    ],
)
def test_heads_of_a_section(
    shape: tuple[int, int, int, int], more: dict[str, Any], together: int, matrices: int
) -> None:
    values = KERNELS["attention"].values(problem(*shape, **more), TALL, H200)
    assert (values["together"], values["matrices"]) == (together, matrices)


def test_a_groups_heads_in_one_block_are_one_matrix() -> None:
    p = problem(4, 32, 64, 128, kv_heads=8)
    assert KERNELS["attention"].values(p, replace(TALL, grouped=True), H200)["matrices"] == 32


@pytest.mark.parametrize(
    ("arch", "dim", "first"),
    [
        ("sm_80", 128, "128x64-4w-1"),
        ("sm_80", 256, "128x48-8w-2"),  # two blocks of 96 KiB do not fit
        ("sm_90a", 128, "128x64-4w-1"),
        ("sm_90a", 256, "64x64-4w-1"),
        ("sm_103", 256, "64x64-4w-1"),
        ("sm_86", 128, "128x48-4w-2"),
        ("sm_120", 256, "128x16-8w-2"),
        ("sm_90a", 64, "128x64-4w-2"),
        ("sm_90a", 192, "64x64-4w-1"),
        ("sm_86", 96, "128x64-4w-1"),
    ],
)
def test_keys_and_values_share_a_stage_where_two_blocks_fit(
    arch: str, dim: int, first: str
) -> None:
    tiles = KERNELS["attention"].tiles(problem(1, 1, 4096, dim).spec, row(arch))
    assert tiles[0].name == first
    assert all(t.sections == (arch in ("sm_80", "sm_90a", "sm_103")) for t in tiles)


def test_keys_of_8_bits_share_no_stage() -> None:
    tiles = row("sm_90a").tiles["attention"]
    assert any(t.shared_stage for t in tiles)
    assert not any(t.shared_stage for t in tiles if t.dtype_kv is not None)
