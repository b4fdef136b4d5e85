"""How the shared GEMM's tiles divide what sums and maxima are of, and how parts are added up."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernelseam import epilogues
from kernelseam.contract import Device
from kernelseam.descriptors import BatchedGemmStrided
from kernelseam.dtypes import DType
from kernelseam.kernels.elements import divide_up
from kernelseam.kernels.gemm.gemm import GemmDefinition
from kernelseam.kernels.gemm.reductions import (
    Strips,
    reduce_launches,
    reduce_problems,
    strips_of,
    takes_reductions,
)
from kernelseam.kernels.gemm.tile import GemmTile

TILE = GemmTile(frozenset({DType.float16}), 64, 128, 32, 2, 2, 2)  # warps of 32×64


def problem(M: int, N: int, batch: int, *parts: Any, dtype: str = "float16") -> Any:
    return BatchedGemmStrided(
        M=M, N=N, K=8, batch=batch, dtype=dtype, epilogue=list(parts)
    ).problem()


def empty(*shape: int) -> Any:
    return np.empty(shape, np.float32)


@settings(max_examples=80)
@given(
    *(st.integers(0, 300) for _ in "MN"),
    st.integers(0, 3),
    st.sampled_from([(1, 128), (64, 64), (32, 1)]),
    st.sampled_from([32, 16]),
)
def test_every_part_is_added_once(
    M: int, N: int, batch: int, block: tuple[int, int], high: int
) -> None:
    """By the launch's numbers, as reduce.h reads them: of warps of 32 rows, and of Hopper's of 16,
    which have no strips beyond the result."""
    blocks = [-(-n // size) for n, size in zip((M, N), block, strict=True)]
    given = problem(
        *(M, N, batch),
        epilogues.row_sums(empty(M)),
        epilogues.column_sums(empty(batch, N)),
        epilogues.amax(empty(1)),
        epilogues.amax(empty(batch, *blocks), block=block),
    )
    strips = strips_of(given, TILE)
    if high == 16:
        strips = Strips(16, 64, divide_up(M, 16), divide_up(N, 64))
    by_rows, by_columns, by_warps = (N, 64, M, 1), (M, high, N, 1), (M, high, N, 64)
    kinds = {(1, 128): by_rows, (64, 64): by_warps, (32, 1): by_columns}
    for one, shape, kind in zip(
        reduce_problems(given, strips),
        given.reduction_shapes,
        (by_rows, by_columns, by_warps, kinds[block]),
        strict=True,
    ):
        seen, parts = np.zeros(one.parts, int), one.parts
        for at in np.ndindex(*one.out):
            ends = [
                (i * n, min((i + 1) * n, most))
                for i, n, most in zip(at, one.of, parts, strict=True)
            ]
            seen[tuple(slice(*x) for x in ends)] += 1
        there = [-(-n // size) for n, size in (kind[:2], kind[2:])]  # others are of nothing
        assert (seen[:, : there[0], : there[1]] == 1).all() and seen.max(initial=0) <= 1
        assert math.prod(one.out) == math.prod(shape)
        assert one.part_strides[2] == 1


def test_the_workspace_has_the_parts_of_each() -> None:
    p = problem(100, 200, 2, epilogues.row_sums(empty(100)), epilogues.amax(empty(1)))
    offsets, launches, size = reduce_launches(p, strips_of(p, TILE))
    assert offsets == {"parts_0": 0, "parts_1": 4 * 2 * 128 * 4}  # 2 matrices, 4·32 rows, 4 strips
    assert size == offsets["parts_1"] + 4 * 2 * 4 * 4  # strips of 32 rows and 64 columns
    assert [x.workspace["parts"] for x in launches] == [*offsets.values()]
    assert [x.operands for x in launches] == [{"out": "reduction_0"}, {"out": "reduction_1"}]


def added(p: Any, parts: Any) -> Any:
    """What reduce.h makes of parts [matrix, row, column]."""
    out = parts
    for axis, (n, most) in enumerate(zip(p.of, p.parts, strict=True)):
        out = np.add.reduceat(out, range(0, most, n), axis)
    return out


@pytest.mark.parametrize(
    ("M", "N", "batch", "twice"),
    [(20000, 300, 1, ["reduction_1", "reduction_2"]), (2100, 9000, 3, ["reduction_2"])]
    + [(100, 300, 2, [])],
)
def test_many_parts_are_added_in_two_steps(M: int, N: int, batch: int, twice: list[str]) -> None:
    """Of columns and of all: blocks of one launch would read thousands one after the other."""
    p = problem(
        *(M, N, batch),
        epilogues.row_sums(empty(M)),
        epilogues.column_sums(empty(batch, N)),
        epilogues.amax(empty(1)),
    )
    strips = strips_of(p, TILE)
    offsets, launches, size = reduce_launches(p, strips)
    outs = [x.operands.get("out") for x in launches]
    steps = [[None, n] if n in twice else [n] for n in (f"reduction_{i}" for i in range(3))]
    assert outs == [n for step in steps for n in step]
    at = iter(launches)
    for name, one in zip(offsets, reduce_problems(p, strips), strict=True):
        parts = np.random.default_rng(0).integers(0, 9, one.parts)
        step, last, place = next(at), parts, offsets[name]
        while True:
            assert (step.workspace["parts"], step.problem.parts) == (place, last.shape)
            last = added(step.problem, last)
            if step.operands:
                break
            place = step.workspace["out"]
            assert place % 16 == 0 and size - place >= 4 * last.size
            assert step.problem.out_strides == tuple(x // last.itemsize for x in last.strides)
            step = next(at)
        assert (last == added(one, parts)).all() and step.problem.out == one.out


@pytest.mark.parametrize(
    ("block", "fits"),
    [((1, 64), True), ((1, 32), False), ((32, 64), True), ((16, 64), False), ((1, 1), False)],
)
def test_blocks_are_of_whole_warps(block: tuple[int, int], fits: bool) -> None:
    shape = [-(-n // size) for n, size in zip((100, 200), block, strict=True)]
    p = problem(100, 200, 1, epilogues.amax(empty(*shape), block=block))
    assert takes_reductions(p.spec, TILE) is fits


def test_blocks_that_no_tile_has_are_refused(host_row: Any) -> None:
    p = problem(100, 200, 1, epilogues.amax(empty(34, 67), block=(3, 3)))
    reason = GemmDefinition().refuse(p, host_row)
    assert reason == f"no tile of {host_row.arch} has warps of blocks that sums and maxima are of"


@pytest.mark.parametrize("backend", ["cuda", "rocm"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_is_not_refused_is_offered_tiles(backend: str, dtype: str) -> None:
    """Also where only teams have warps of so small blocks, for matrices of more than two tiles."""
    archs = pytest.importorskip(
        f"kernelseam_{backend}.archs", reason=f"kernelseam-{backend} is missing"
    )
    kernel, sizes = GemmDefinition(), (1, 16, 32, 64, 128)
    for block, row in itertools.product(itertools.product(sizes, sizes), archs.ROWS.values()):
        shape = [-(-300 // size) for size in block]
        p = problem(300, 300, 1, epilogues.amax(empty(*shape), block=block), dtype=dtype)
        tiles = kernel.offered(p, row)
        assert bool(tiles) == (kernel.refuse(p, row) is None), (row.arch, block, tiles)
        assert not tiles or kernel.tile(p, row, Device(backend, 0, row.arch)) in tiles


def test_teams_are_for_small_matrices_and_what_no_other_tile_takes(host_row: Any) -> None:
    """With 300 rows: teams where warps are of 16 rows, else tiles that share loads."""
    kernel = GemmDefinition()
    for block, teams in (((16, 16), True), ((64, 64), False)):
        shape = [-(-300 // size) for size in block]
        p = problem(300, 300, 1, epilogues.amax(empty(*shape), block=block))
        assert {t.teams > 1 for t in kernel.offered(p, host_row)} == {teams}


@pytest.fixture
def host_row() -> Any:
    from kernelseam_cuda import archs

    return archs.row("sm_80")
