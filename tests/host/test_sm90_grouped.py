"""Tiles of grouped products on Hopper, their scheduler run on the host: every tile that has rows
once, by whichever block, and a planted fault."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import pytest

pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
from kernelseam.kernels.elements import divider  # noqa: E402
from kernelseam.kernels.gemm.gemm import NOT_GROUPED  # noqa: E402
from mutants import SM90  # noqa: E402
from sm90_probe import Change, run  # noqa: E402

SOURCE = """
#include "sm90/gemm/groups.h"
KS_KERNEL(16, 1) probe(const i64* n, const int* ends, const int* rows, i64* out) {
  if (thread_index() != 0) return;
  auto divider = [&](int i) { return FastDivmod{(int)n[i], (unsigned)n[i + 1], (int)n[i + 2]}; };
  const TileScheduler order{divider(0), divider(3), divider(0), divider(0), 0, (int)n[8]};
  const Groups groups{ends, (int)n[6], (int)n[7]};
  GroupTable table;
  for (int g = 0; g <= n[6] && HAS_TABLE; g++) table.rows[g] = rows[g];
  for (int first = 0; first < n[9]; first++) {
    const GroupScheduler scheduler(order, groups, table, (int)n[9], first, (int)n[10]);
    for (int t = first; t < scheduler.total; t += n[9])
      for (int rank = 0; rank < Config::CLUSTER; rank++, out += 10) {
        const TileCoord p = scheduler.tile(t, rank);
        const int found[] = {t,       p.row, p.column, p.matrix, p.batch,
                             p.begin, p.end, p.first,  p.slices, p.before};
        for (int i = 0; i < 10; i++) out[i] = found[i];
      }
  }
}"""
BM, BN, SLICES = 128, 256, 64
SKEWED = (5, 0, 700, 1, 1300, 0, 170)


def walked(
    sizes: tuple[int, ...],
    N: int,
    cluster: int,
    blocks: int,
    change: Change,
    slices: int = SLICES,
    fewest: int = 0,
) -> list[tuple[int, ...]]:
    """(tile, row, column, matrix, batch, begin, end, first slice, slices, blocks before) in the
    order in which ``blocks`` take them, one after the other."""
    columns = -(-N // BN)
    table = [0, *accumulate(-(-n // (BM * cluster)) for n in sizes)]
    return _walked(1, cluster, change, columns, blocks, [*accumulate(sizes)], table, slices, fewest)


def walked_columns(
    sizes: tuple[int, ...], M: int, cluster: int, blocks: int, change: Change
) -> list[tuple[int, ...]]:
    """The same of groups along N."""
    ends, rows = list(accumulate(sizes)), -(-M // (BM * cluster))
    begins = [0, *ends[:-1]]
    counts = [-(-(b % 8 + n) // BN) if n else 0 for b, n in zip(begins, sizes, strict=True)]
    table = [0, *accumulate(counts)]
    return _walked(2, cluster, change, rows, blocks, ends, table)


def _walked(
    grouped: int,
    cluster: int,
    change: Change,
    across: int,
    blocks: int,
    ends: list[int],
    table: list[int],
    slices: int = SLICES,
    fewest: int = 0,
) -> list[tuple[int, ...]]:
    """``across``: tiles in a row, or in a column."""
    dividers = [x for d in (across, 8 * across) for x in (d, *divider(d))]
    given = [*dividers, len(ends), ends[-1] + 9, 0, blocks, slices]
    most = (table[-1] * across + 3 * blocks * bool(fewest)) * cluster
    out = np.full((most + 1, 10), -1, np.int64)
    _run(grouped, cluster, change, fewest, given, ends, table, out)
    assert (out[-1] == -1).all()
    return [tuple(int(x) for x in row) for row in out if row[0] >= 0]


def _run(grouped: int, cluster: int, change: Change, fewest: int, *arrays: Any) -> None:
    constants = {
        **NOT_GROUPED,
        "GROUPED": grouped,
        "BM": BM,
        "BN": BN,
        "CLUSTER": cluster,
        "GROUP_ROWS": 8,
        "SHARED_A": 0,
        "TAIL_SLICES": fewest,
        "T": "bf16",
        "TC": "bf16",
    }
    given, ends, table, out = arrays
    numbers = (np.array(ends, np.int32), np.array(table, np.int32))
    run(SOURCE, constants, change, np.array(given, np.int64), *numbers, out)


Product = tuple[int, int, int]
LISTED: tuple[Product, ...] = (
    *((4096, 512, 64), (64, 0, 128), (1, 24, 8), (1300, 1000, 300), (0, 256, 72), (700, 1, 5)),
    *((128 + 97 * i % 401, 8 + 61 * i % 999, 1 + i) for i in range(90)),
)


def walked_list(cluster: int, blocks: int, change: Change) -> list[tuple[int, ...]]:
    """(tile, row, column, matrix, batch, K, M, 0, 0, 0) in the order in which blocks take them."""
    counts = [-(-m // (BM * cluster)) * -(-n // BN) for m, n, _ in LISTED]
    table = [0, *accumulate(counts)]
    given = [*[1, *divider(1)] * 2, len(LISTED), 0, 0, blocks, SLICES]
    out = np.full((table[-1] * cluster + 1, 10), -1, np.int64)
    numbers = [x for product in LISTED for x in (*product, 1, 1, 1)]
    _run(4, cluster, change, 0, given, numbers, table, out)
    assert (out[-1] == -1).all()
    return [tuple(int(x) for x in row) for row in out[:-1]]


def expected_list(cluster: int) -> set[tuple[int, ...]]:
    """Of every tile (row, column, matrix, batch, K, M, 0, 0, 0): maps have one matrix, number 0."""
    return {
        (i * BM, j, g, 0, k, m, 0, 0, 0)
        for g, (m, n, k) in enumerate(LISTED)
        for i in range(-(-m // (BM * cluster)) * cluster)
        for j in range(0, n, BN)
    }


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("blocks", [1, 66])
def test_every_tile_of_a_list_once(cluster: int, blocks: int) -> None:
    found = walked_list(cluster, blocks, same)  # type: ignore[arg-type]
    wanted = expected_list(cluster)
    assert len(found) == len(wanted) and {x[1:] for x in found} == wanted
    assert sorted({t for t, *_ in found}) == list(range(len(found) // cluster))


def expected(sizes: tuple[int, ...], N: int, cluster: int) -> set[tuple[int, ...]]:
    """(row, column, matrix, batch, begin, end, 0, 0, 0) of every tile, also in a cluster's rest."""
    tiles, begin = set(), 0
    for g, n in enumerate(sizes):
        rows = -(-n // (BM * cluster)) * cluster
        tiles |= {
            (begin + i * BM, j, g, g, begin, begin + n, 0, 0, 0)
            for i in range(rows)
            for j in range(0, N, BN)
        }
        begin += n
    return tiles


def same(bundle: object) -> object:
    return bundle


@pytest.mark.parametrize(
    ("sizes", "N"),
    [
        (SKEWED, 1000),
        ((0, 0, 3), 256),
        ((4096,), 512),
        ((1,) * 300, 300),
        ((*(0,) * 1000, 900, *(0,) * 23), 700),
        (tuple(97 * i % 401 for i in range(120)), 392),
    ],
)
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("blocks", [1, 66])
def test_every_tile_once(sizes: tuple[int, ...], N: int, cluster: int, blocks: int) -> None:
    found = walked(sizes, N, cluster, blocks, same)  # type: ignore[arg-type]
    assert len(found) == len(expected(sizes, N, cluster))
    assert {x[1:] for x in found} == expected(sizes, N, cluster)
    assert sorted({t for t, *_ in found}) == list(range(len(found) // cluster))


@pytest.mark.parametrize(
    ("sizes", "M"),
    [(SKEWED, 1000), ((0, 0, 3), 128), ((1,) * 300, 300), ((8, 256, 0, 509, 3, 1024), 1280)],
)
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("blocks", [1, 66])
def test_every_tile_along_n_once(sizes: tuple[int, ...], M: int, cluster: int, blocks: int) -> None:
    """A group's tiles begin with the 16 bytes of C that it begins in."""
    tiles, begin = set(), 0
    for g, n in enumerate(sizes):
        first = begin // 8 * 8
        tiles |= {
            (i, j, g, g, begin, begin + n, 0, 0, 0)
            for i in range(0, -(-M // (BM * cluster)) * cluster * BM, BM)
            for j in range(first, begin + n, BN)
            if n
        }
        begin += n
    found = walked_columns(sizes, M, cluster, blocks, same)  # type: ignore[arg-type]
    assert len(found) == len(tiles) and {x[1:] for x in found} == tiles


@pytest.mark.parametrize("blocks", [200, 90, 70, 66, 40, 31, 13, 11, 9, 8, 7])
@pytest.mark.parametrize("slices", [15, 16, 31, 33, 64, 1000])
def test_tiles_of_a_last_wave_are_cut_into_parts(blocks: int, slices: int) -> None:
    """45 tiles: each slice of each once. A block adds up sums of blocks before it alone, which they
    have before they wait themselves; none has two that others wait for."""
    sizes, fewest = (300, 0, 500, 1000), 16
    wanted = expected(sizes, 2 * BN + 3, 1)
    found = walked(sizes, 2 * BN + 3, 1, blocks, same, slices, fewest)  # type: ignore[arg-type]
    assert {x[1:7] for x in found} == {x[:6] for x in wanted}
    tiles: dict[tuple[int, ...], list[tuple[int, int, int, int]]] = {}
    for t, *place, first, count, before in found:
        part = (first, count, before, t % blocks) if count else (0, slices, 0, t % blocks)
        tiles.setdefault(tuple(place), []).append(part)
    for parts in tiles.values():
        parts.sort()
        *others, (_, _, before, last) = parts
        assert [0, *accumulate(p[1] for p in parts)] == [*(p[0] for p in parts), slices]
        assert before == len(others) and all(p[2] == -1 for p in others)
        assert [p[3] for p in others] == list(range(last - before, last))
    for block in range(blocks):
        own = [x[9] for x in found if x[0] % blocks == block and x[8]]
        assert -1 not in own[1:], "what is waited for comes first"
    waves, rest = divmod(len(wanted), blocks)
    most = min(blocks // rest, slices // fewest) if rest else 1
    counts = [len(parts) for parts in tiles.values()]
    if most > 1:  # alike, so that the parts of other tiles begin with the same slices
        assert counts.count(-(-slices // -(-slices // most))) == rest
        assert counts.count(1) == len(wanted) - rest
    elif rest and waves >= 4 and slices >= fewest:
        sums = [0] * blocks
        for t, *_, count, _ in found:
            sums[t % blocks] += count or slices
        assert max(sums) == waves * slices + max(-(-rest * slices // blocks), fewest)
    else:
        assert max(counts) == 1


def test_a_planted_fault_of_parts_is_found() -> None:
    given: Any = ((300, 0, 500, 1000), 2 * BN + 3, 1, 200)
    late = walked(*given, planted("part-begins-a-slice-late"), 64, 16)
    assert sum(x[8] for x in walked(*given, same, 64, 16)) == 45 * 64 > sum(x[8] for x in late)


def test_bands_of_a_group_are_nearly_even() -> None:
    """Nine rows of tiles are walked by five and four, not by eight and one."""
    found = walked((9 * BM,), 2 * BN, 1, 1, same)  # type: ignore[arg-type]
    rows = [row // BM for _, row, *_ in sorted(found)]
    assert rows == [*range(5), *range(5), *range(5, 9), *range(5, 9)]


def planted(name: str) -> Change:
    (mutant,) = (m for m in SM90 if m.name == name)
    return mutant


def test_a_planted_fault_is_found() -> None:
    found = walked(SKEWED, 1000, 1, 66, planted("offset-one-group-late"))
    assert {x[1:] for x in found} != expected(SKEWED, 1000, 1)


def test_a_planted_fault_of_columns_is_found() -> None:
    wanted = walked_columns(SKEWED, 1000, 1, 66, same)  # type: ignore[arg-type]
    assert walked_columns(SKEWED, 1000, 1, 66, planted("columns-begin-with-the-group")) != wanted


@pytest.mark.parametrize("name", ["beyond-the-map-of-a-list", "a-last-band-as-high"])
def test_a_planted_fault_of_a_list_is_found(name: str) -> None:
    found = walked_list(1, 66, planted(name))
    assert {x[1:] for x in found} != expected_list(1)
