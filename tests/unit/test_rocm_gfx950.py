"""The kernel definition of gfx950's attention: what it takes, what it is launched with, and where
dispatch prefers it. Nothing here needs a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from attention_problems import attention_problem
from kernelseam.contract import Device
from kernelseam.costs import predicted
from kernelseam.dtypes import DType
from kernelseam.kernels import COMPOSITIONS
from kernelseam_rocm import archs
from kernelseam_rocm.gfx950 import BM, DIMS, STAGES, TILES, Gfx950Attention

KERNEL, ROW = Gfx950Attention(), archs.row("gfx950")
assert ROW.product is not None
DEVICE: Device = ROW.product
problem = partial(attention_problem, batch=2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prefix": True}, "prefix is not supported by this kernel"),
        ({"batch_invariant": True}, "batch_invariant is not supported by this kernel"),
        ({"softcap": True, "sinks": True}, "sinks, softcap are not supported by this kernel"),
        ({"dtype": DType.float32}, "it takes bfloat16 and float16, not float32"),
        ({"dtype_out": DType.float32}, "its result is of bfloat16, not float32"),
        ({"head_dim": 96, "value_dim": 96}, "head dims 96: it takes 64 and 128"),
        ({"head_dim": 128, "value_dim": 64}, "head dims 128/64: it takes 64 and 128"),
        (
            {"q_view": "packed"},
            "queries packed with keys strided: it takes both strided or both packed",
        ),
        (
            {"q_view": "pointers", "kv_view": "paged"},
            "queries pointers with keys paged: it takes strided and packed ones",
        ),
        (
            {"kv_view": "paged", "page_size": 24},
            "page_size = 24: it takes multiples of 16",
        ),
        ({"vector": 8}, "rows at multiples of 8 bytes: its copies take multiples of 16"),
        ({"S_k": 2**30}, "S_q + S_k = 1073745920: it takes less than 2**30"),
        (
            {"kv_heads": 2**15, "heads": 2**15},
            (
                "stride_k_row = 4194304: it takes 0 to 2**22 - 1, as offsets within a tile have 32 "
                "bits"
            ),
        ),
    ],
)
def test_what_it_does_not_take_is_refused_with_the_reason(
    changes: dict[str, object], reason: str
) -> None:
    assert KERNEL.refuse(problem(**changes), ROW) == reason


def test_a_scale_that_is_not_positive_is_refused() -> None:
    assert (
        KERNEL.refuse(replace(problem(), scale=-1.0), ROW) == "scale = -1.0: it takes more than 0"
    )


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"causal": True},
        {"window": True},
        {"q_view": "packed", "kv_view": "packed"},
        {"kv_view": "paged", "page_size": 48, "window": True},
    ],
)
def test_what_it_takes(dim: int, more: dict[str, object]) -> None:
    lengths = not more or "page_size" in more
    p = problem(head_dim=dim, value_dim=dim, kv_heads=4, lengths=lengths, **more)
    assert KERNEL.refuse(p, ROW) is None
    tile = KERNEL.tile(p, ROW, DEVICE)
    assert tile.head_dim == dim and tile.bn * dim == 8192
    # both rings; before them the queries, behind four tiles; waves copy twice 1024 bytes of a tile
    assert 2 * STAGES * tile.bn * dim * 2 == 98304 <= tile.shared_bytes
    assert tile.shared_bytes == {64: 98304, 128: 4 * 16384 + 65536}[dim]
    assert tile.shared_bytes <= ROW.shared_bytes_per_block
    assert tile.bn * dim * 2 == 8 * 2048
    assert KERNEL.grid(p, tile, DEVICE) == 16 * 16 * 2 and KERNEL.threads(tile, ROW) == 512
    values = KERNEL.values(p, tile, DEVICE)
    assert (values["q_tiles"], values["head_group"], values["batch"]) == (16, 4, 2)
    assert values["scale_log2"] == pytest.approx(dim**-0.5 * 1.4426950408889634)
    assert values["left"] == (7 if "window" in more else p.S_q + p.S_k)
    assert values["page_size"] == more.get("page_size", 1)
    (launch,) = KERNEL.launches(p, tile, DEVICE).steps
    assert launch.kernel is KERNEL


def test_blocks_of_ragged_queries() -> None:
    p = problem(S_q=BM + 1)
    assert KERNEL.grid(p, KERNEL.tile(p, ROW, DEVICE), DEVICE) == 2 * 16 * 2
    assert [t.name for t in TILES] == ["256x128-8w-3", "256x64-8w-3"]


def test_sequences_that_decode_are_expected_to_be_shorter_than_the_longest() -> None:
    """As of the shared kernel, beside which it is ranked: nine tenths of the keys."""
    p = problem(1, 10000, lengths=True)
    assert 0.89 < KERNEL.work(p, TILES[1], DEVICE).bytes / p.bytes_moved < 0.91


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("S", "own"), [(1, False), (100, False), (65536, True)])
@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("causal", [False, True])
def test_dispatch_prefers_it_where_blocks_are_whole(
    dim: int, S: int, own: bool, batch: int, causal: bool
) -> None:
    """Its blocks have 256 queries: few go to the shared kernel, whose tiles are smaller."""
    p = problem(S, S, batch=batch, head_dim=dim, value_dim=dim, causal=causal)
    shared = COMPOSITIONS["attention"]
    seconds = {
        kernel: sum(
            predicted(step.kernel.work(step.problem, step.tile, DEVICE), ROW.costs, DEVICE.limits)
            for step in kernel.launches(p, kernel.tile(p, ROW, DEVICE), DEVICE).steps
        )
        for kernel in (KERNEL, shared)
    }
    assert (seconds[KERNEL] < seconds[shared]) == own
