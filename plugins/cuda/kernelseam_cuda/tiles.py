"""Tile shapes of the shared kernels by arch: measured choices, no code.

Rows are tried against an arch's shared memory, so that one list serves archs that differ only in that. Every row
compiles without spills for every covering spec; ``tools/kernel_table.py`` shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernelseam.dtypes import DType
from kernelseam.kernels import AttentionTile, BackwardTile, GemmTile

_HALVES = frozenset({DType.float16, DType.bfloat16})
_SINGLE = frozenset({DType.float32})
_DOUBLE = frozenset({DType.float64})

GEMM = (
    GemmTile(_HALVES, bm=128, bn=128, bk=64, warps_m=2, warps_n=2, stages=2, min_blocks=2),
    GemmTile(_HALVES, bm=128, bn=64, bk=64, warps_m=2, warps_n=2, stages=3, min_blocks=2),
    GemmTile(_HALVES, bm=64, bn=64, bk=64, warps_m=2, warps_n=2, stages=2, min_blocks=4),
    GemmTile(_HALVES, bm=32, bn=32, bk=32, warps_m=1, warps_n=2, stages=2, min_blocks=8),
    GemmTile(_HALVES, bm=16, bn=16, bk=32, warps_m=1, warps_n=1, stages=2, min_blocks=4, teams=8),
    GemmTile(_SINGLE, bm=64, bn=64, bk=16, warps_m=2, warps_n=2, stages=3, min_blocks=4),
    GemmTile(_SINGLE, bm=32, bn=32, bk=16, warps_m=2, warps_n=2, stages=3, min_blocks=5),
    GemmTile(_SINGLE, bm=16, bn=16, bk=16, warps_m=1, warps_n=1, stages=2, min_blocks=3, teams=8),
    GemmTile(_DOUBLE, bm=64, bn=64, bk=16, warps_m=2, warps_n=2, stages=2, min_blocks=2),
    GemmTile(_DOUBLE, bm=32, bn=32, bk=16, warps_m=2, warps_n=2, stages=2, min_blocks=4),
)

ATTENTION = (
    AttentionTile(_HALVES, max_dim=64, warps=4, rows=32, bn=64, stages=2, plain=True),
    AttentionTile(_HALVES, max_dim=64, warps=4, rows=16, bn=64, stages=2, q_resident=True, min_blocks=2, plain=True),
    AttentionTile(_HALVES, max_dim=64, warps=4, rows=16, bn=32, stages=2, q_resident=True, min_blocks=2),
    AttentionTile(_HALVES, max_dim=128, warps=4, rows=16, bn=64, stages=2, q_resident=True, min_blocks=2, plain=True),
    AttentionTile(_HALVES, max_dim=128, warps=4, rows=16, bn=48, stages=2, q_resident=True, min_blocks=2),
    AttentionTile(_HALVES, max_dim=192, warps=8, rows=16, bn=32, stages=2),
    AttentionTile(_HALVES, max_dim=256, warps=8, rows=16, bn=32, stages=2, plain=True),
    AttentionTile(_HALVES, max_dim=256, warps=8, rows=16, bn=16, stages=2),
    AttentionTile(_HALVES, max_dim=576, warps=4, rows=16, bn=32, stages=2, column_warps=4),
    AttentionTile(_HALVES, max_dim=576, warps=4, rows=16, bn=16, stages=2, column_warps=4),
    AttentionTile(_SINGLE, max_dim=64, warps=4, rows=16, bn=32, stages=2),
    AttentionTile(_SINGLE, max_dim=128, warps=4, rows=16, bn=16, stages=2),
    AttentionTile(_SINGLE, max_dim=256, warps=4, rows=8, bn=16, stages=2),
)


def _backward(*rows: tuple[frozenset[DType], int, int, int, int, int, int, int, int, int, bool]) -> tuple[Any, ...]:
    """Tiles of gradients, those in order with a kernel for keys and one for queries: they keep 64 rows a step in
    registers where one for both does not. Where the seventh column, ``score_rows``, is not 0, scores are handed on, so
    that no two warps of a block make the same."""
    return tuple(
        BackwardTile(
            dtypes, max_dim, warps, own, step, 2, column_warps, plain=plain, apart=not query_rows,
            score_rows=score_rows, query_rows=query_rows, unroll=unroll, min_blocks=min_blocks,
        )
        for dtypes, max_dim, warps, own, step, column_warps, score_rows, query_rows, unroll, min_blocks, plain in rows
    )


ATTENTION_BWD = _backward(
    (_HALVES, 64, 8, 16, 64, 1, 0, 0, 4, 1, True),
    (_HALVES, 64, 8, 16, 32, 1, 0, 0, 4, 1, False),
    (_HALVES, 128, 8, 32, 64, 2, 32, 0, 2, 1, True),
    (_HALVES, 128, 8, 16, 32, 1, 0, 0, 4, 1, True),
    (_HALVES, 128, 8, 16, 32, 2, 0, 0, 4, 1, False),
    (_HALVES, 256, 8, 32, 64, 4, 16, 0, 2, 1, True),
    (_HALVES, 256, 8, 32, 32, 4, 16, 0, 2, 1, True),
    (_HALVES, 256, 8, 16, 32, 2, 0, 0, 4, 1, True),
    (_HALVES, 256, 8, 16, 16, 2, 0, 0, 4, 1, False),
    (_SINGLE, 64, 4, 8, 32, 1, 0, 0, 4, 1, False),
    (_SINGLE, 128, 4, 8, 16, 1, 0, 0, 4, 1, False),
    (_SINGLE, 256, 4, 8, 16, 2, 0, 0, 4, 1, False),
    # With atomics: no score is made twice. Warps divide scores, dk and dv, and dq each in their own way, so that a
    # fragment that is read from shared memory serves as many products as it can. Where 64 rows a step do not fit, or
    # scores are changed, it is 32.
    (_HALVES, 64, 4, 32, 64, 2, 32, 32, 2, 3, True),
    (_HALVES, 64, 8, 32, 32, 2, 16, 16, 2, 1, False),
    (_HALVES, 128, 8, 32, 64, 2, 32, 32, 2, 1, True),
    (_HALVES, 128, 8, 32, 32, 2, 16, 16, 2, 1, False),
    (_HALVES, 128, 8, 32, 32, 4, 16, 16, 2, 1, False),
    (_HALVES, 256, 8, 32, 64, 4, 32, 32, 2, 1, True),
    (_HALVES, 256, 8, 32, 32, 4, 16, 16, 1, 1, False),
    (_SINGLE, 64, 4, 32, 32, 2, 16, 16, 2, 1, False),
    (_SINGLE, 128, 4, 16, 16, 2, 8, 8, 2, 1, False),
)

TILES: Mapping[str, tuple[Any, ...]] = {"gemm": GEMM, "attention": ATTENTION, "attention_bwd": ATTENTION_BWD}
