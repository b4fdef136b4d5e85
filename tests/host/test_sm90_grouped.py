"""Tiles of grouped products on Hopper, their scheduler run on the host: every tile that has rows
once, by whichever block, and a planted fault."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest

pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
from kernelseam.kernels.elements import divider  # noqa: E402
from kernelseam.kernels.gemm.gemm import NOT_GROUPED  # noqa: E402
from sm90_mutants import MUTANTS  # noqa: E402
from sm90_probe import Change, run  # noqa: E402

SOURCE = """
#include "sm90/gemm/groups.h"
KS_KERNEL(16, 1) probe(const i64* n, const int* ends, const int* rows, i64* out) {
  if (thread_index() != 0) return;
  auto divider = [&](int i) { return FastDivmod{(int)n[i], (unsigned)n[i + 1], (int)n[i + 2]}; };
  const TileScheduler order{divider(0), divider(3), divider(0), divider(0), 0, (int)n[8]};
  const Groups groups{ends, (int)n[6], (int)n[7]};
  GroupTable table;
  for (int g = 0; g <= n[6] && Config::GROUPED == ALONG_M; g++) table.rows[g] = rows[g];
  for (int first = 0; first < n[9]; first++) {
    const GroupScheduler scheduler(order, groups, table);
    for (int t = first; t < scheduler.total; t += n[9])
      for (int rank = 0; rank < Config::CLUSTER; rank++, out += 6) {
        const TileCoord p = scheduler.tile(t, rank);
        const int found[] = {t, p.row, p.column, p.batch, p.begin, p.end};
        for (int i = 0; i < 6; i++) out[i] = found[i];
      }
  }
}"""
BM, BN = 128, 256
SKEWED = (5, 0, 700, 1, 1300, 0, 170)


def walked(
    sizes: tuple[int, ...], N: int, cluster: int, blocks: int, change: Change
) -> list[tuple[int, ...]]:
    """(tile, row, column, group, begin, end) in the order in which ``blocks`` take them."""
    ends, columns = list(accumulate(sizes)), -(-N // BN)
    table = [0, *accumulate(-(-n // (BM * cluster)) for n in sizes)]
    dividers = [x for d in (columns, 8 * columns) for x in (d, *divider(d))]
    given = [*dividers, len(sizes), ends[-1] + 9, 0, blocks]
    out = np.full((table[-1] * columns * cluster + 1, 6), -1, np.int64)
    constants = {
        **NOT_GROUPED,
        "GROUPED": 1,
        "BM": BM,
        "BN": BN,
        "CLUSTER": cluster,
        "GROUP_ROWS": 8,
        "SHARED_A": 0,
    }
    run(
        SOURCE,
        constants,
        change,
        np.array(given, np.int64),
        np.array(ends, np.int32),
        np.array(table, np.int32),
        out,
    )
    return [tuple(int(x) for x in row) for row in out[:-1]]


def expected(sizes: tuple[int, ...], N: int, cluster: int) -> set[tuple[int, ...]]:
    """(row, column, group, begin, end) of every tile, those of a cluster's rest among them."""
    tiles, begin = set(), 0
    for g, n in enumerate(sizes):
        rows = -(-n // (BM * cluster)) * cluster
        tiles |= {
            (begin + i * BM, j, g, begin, begin + n) for i in range(rows) for j in range(0, N, BN)
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


def test_bands_of_a_group_are_nearly_even() -> None:
    """Nine rows of tiles are walked by five and four, not by eight and one."""
    found = walked((9 * BM,), 2 * BN, 1, 1, same)  # type: ignore[arg-type]
    rows = [row // BM for _, row, *_ in sorted(found)]
    assert rows == [*range(5), *range(5), *range(5, 9), *range(5, 9)]


def test_a_planted_fault_is_found() -> None:
    (late,) = (m for m in MUTANTS if m.name == "offset-one-group-late")
    found = walked(SKEWED, 1000, 1, 66, late)
    assert {x[1:] for x in found} != expected(SKEWED, 1000, 1)
