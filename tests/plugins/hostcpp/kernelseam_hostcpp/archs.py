"""The two archs of the host: copies that write shared memory by themselves, and copies through
registers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kernelseam.contract import ArchRow, of_arch
from kernelseam.descriptors.common.precision import PRECISIONS
from kernelseam.dtypes import E4M3, DType
from kernelseam.kernels import AttentionTile, BackwardTile, DecodeTile, GemmTile, GemvTile

WARP = 16
OPTIONS = (
    "-std=c++17",
    "-pthread",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-U_FORTIFY_SOURCE",
    "-Wall",
    "-Wno-unknown-pragmas",
)
"""Device memory has no types, products and sums are each rounded, and jumps between stacks are
meant."""
LIBRARY = ("-O1", "-fPIC", "-shared")
"""A second's optimisation more would take longer than all the launches of a kernel."""

_F16, _BF16 = frozenset({DType.float16}), frozenset({DType.bfloat16})
_SINGLE, _DOUBLE = frozenset({DType.float32}), frozenset({DType.float64})


def _gemm(
    dtypes: frozenset[DType], bm: int, bk: int, stages: int, persistent: bool, bn: int = 32
) -> GemmTile:
    return GemmTile(
        dtypes, bm=bm, bn=bn, bk=bk, warps_m=2, warps_n=2, stages=stages, persistent=persistent
    )


def _teams(dtypes: frozenset[DType], stages: int, persistent: bool) -> GemmTile:
    return GemmTile(dtypes, 16, 16, 16, 1, 1, stages, persistent=persistent, teams=3)


def _attention(
    dtypes: frozenset[DType],
    max_dim: int,
    stages: int,
    *,
    warps: int = 2,
    rows: int = 16,
    bn: int = 32,
    q_resident: bool = False,
    q_returned: bool = False,
    column_warps: int = 1,
    plain: bool = False,
    shared_stage: bool = False,
    sections: bool = False,
) -> AttentionTile:
    return AttentionTile(
        dtypes,
        max_dim,
        warps,
        rows,
        bn,
        stages,
        q_resident,
        column_warps=column_warps,
        q_returned=q_returned,
        plain=plain,
        shared_stage=shared_stage,
        sections=sections,
    )


def _precise(tile: Any) -> tuple[Any, ...]:
    """A tile of float32 for each way to multiply it by way of TF32."""
    return tuple(replace(tile, precision=p) for p in PRECISIONS)


# Small tiles, so that small problems have several of them. Between them: rings of every length that
# an arch can have, blocks that stay and blocks that do not, one team of warps and several, queries
# that stay in registers and queries that do not.
TILES = {
    "gemm": (
        _gemm(_F16, 32, 32, 3, True, 64),
        _gemm(_BF16, 32, 16, 2, False),
        _gemm(_SINGLE, 32, 16, 3, True, 64),
        _gemm(_DOUBLE, 16, 16, 2, False),
        _teams(_F16 | _SINGLE, 3, True),
        _teams(_BF16, 2, False),
        *_precise(_gemm(_SINGLE, 32, 16, 2, False)),
    ),
    "gemv": (
        GemvTile(True, 4, 2, 32, 2),
        GemvTile(False, 4, 2, 64, 4, ahead=True),
    ),
    "attention": (
        _attention(_F16, 256, 3, sections=True),
        _attention(_BF16, 64, 1, plain=True, shared_stage=True, sections=True),
        _attention(_BF16, 256, 2, q_resident=True),
        _attention(_SINGLE, 128, 2),
        _attention(_SINGLE, 256, 3, warps=4, rows=8, bn=16),
        _attention(_F16 | _BF16, 576, 2, warps=8, bn=16, column_warps=8),
        *_precise(_attention(_SINGLE, 128, 1, plain=True, shared_stage=True)),
        *_precise(_attention(_SINGLE, 256, 2, warps=4, bn=16, column_warps=2)),
    ),
    "attention_decode": (
        DecodeTile(_F16, 128, 3, 16, 16, 3, 2, q_resident=True, item_cost=5),
        DecodeTile(_BF16, 128, 2, 32, 16, 2, 1, item_cost=5),
    ),
    "attention_bwd": (
        BackwardTile(_F16, 256, 2, 16, 32, 3),
        BackwardTile(_BF16, 256, 2, 32, 16, 2, score_rows=32, resident=True),
        BackwardTile(_SINGLE, 256, 4, 16, 16, 2),
        BackwardTile(_F16, 512, 8, 16, 16, 2, column_warps=4, apart=True),  # as NVIDIA's
        BackwardTile(_SINGLE, 512, 8, 8, 16, 2, column_warps=4, apart=True),
        BackwardTile(_F16, 256, 4, 16, 32, 3, column_warps=2, score_rows=16, query_rows=16),
        BackwardTile(_BF16, 256, 2, 32, 16, 2, score_rows=32, query_rows=16, resident=True),
        BackwardTile(_SINGLE, 256, 4, 16, 16, 2, score_rows=16, query_rows=8),
        *_precise(BackwardTile(_SINGLE, 256, 4, 16, 16, 2)),
        *_precise(BackwardTile(_SINGLE, 128, 4, 32, 32, 2, 2, score_rows=16, query_rows=16)),
    ),
}
TILES_THROUGH_REGISTERS = {
    "gemm": (
        _gemm(_F16, 32, 32, 1, False, 64),
        _gemm(_BF16, 32, 16, 2, True),
        _gemm(_SINGLE, 32, 16, 1, True, 64),
        _gemm(_DOUBLE, 16, 16, 2, False),
        _teams(_F16 | _SINGLE, 1, False),
        _teams(_BF16, 2, True),
        *_precise(_gemm(_SINGLE, 32, 16, 1, True)),
    ),
    "gemv": (
        GemvTile(True, 16, 1, 64, 4, ahead=True),
        GemvTile(False, 8, 3, 32, 2),
    ),
    "attention": (
        _attention(_F16, 256, 1, q_resident=True, q_returned=True),
        _attention(_BF16, 256, 2, q_resident=True, q_returned=True),
        _attention(_SINGLE, 128, 1),
        _attention(_SINGLE, 256, 2, warps=4, rows=8, bn=16),
        _attention(_F16 | _BF16, 576, 1, warps=8, bn=16, column_warps=4),
        *_precise(_attention(_SINGLE, 256, 1, warps=4, bn=16)),
    ),
    "attention_decode": (
        DecodeTile(_F16, 128, 3, 16, 16, 1, 2, q_resident=True, item_cost=5),
        DecodeTile(_BF16, 128, 2, 32, 32, 2, 1, item_cost=5),
    ),
    "attention_bwd": (
        BackwardTile(_F16, 256, 2, 16, 32, 1, one_layout=False),
        BackwardTile(_BF16, 128, 4, 16, 16, 2, one_layout=False),
        BackwardTile(_BF16, 256, 4, 32, 16, 2, column_warps=2, one_layout=False, score_rows=16),
        BackwardTile(_SINGLE, 256, 4, 16, 16, 1),
        BackwardTile(
            _F16,
            256,
            4,
            32,
            32,
            1,
            column_warps=2,
            one_layout=False,
            score_rows=16,
            query_rows=32,
            resident=True,
        ),
        BackwardTile(
            _BF16, 128, 4, 32, 16, 2, column_warps=2, one_layout=False, score_rows=16, query_rows=16
        ),
        BackwardTile(_SINGLE, 256, 4, 16, 16, 1, score_rows=16, query_rows=8),
        *_precise(BackwardTile(_SINGLE, 256, 4, 16, 16, 2, one_layout=False)),
        *_precise(
            BackwardTile(
                _SINGLE, 128, 4, 32, 16, 2, 2, one_layout=False, score_rows=16, query_rows=16
            )
        ),
    ),
}


def _with_stored(
    tiles: Mapping[str, tuple[Any, ...]], stored: DType, widened: bool
) -> Mapping[str, tuple[Any, ...]]:
    """The tiles of attention in half precision once more, over keys of 8 bits; and of the GEMM, of
    A and B of 8 bits."""
    found = dict(tiles)
    narrow = frozenset({stored})
    found["gemm"] += tuple(
        replace(t, dtypes=narrow, bk=32, scale_k=32) for t in tiles["gemm"] if t.dtypes & _F16
    )
    for operation in ("attention", "attention_decode"):
        found[operation] += tuple(
            replace(t, dtype_kv=stored, widened=widened)
            for t in tiles[operation]
            if not t.dtypes & _SINGLE
        )
    return found


def _row(
    arch: str, through_registers: bool, tiles: Mapping[str, tuple[Any, ...]], stored: DType
) -> ArchRow:
    return ArchRow(
        arch=arch,
        warp_size=WARP,
        shared_bytes_per_block=1 << 20,
        registers_per_lane=0,
        platform="platform_host.h",
        defines=(
            ("KS_THROUGH_REGISTERS", str(int(through_registers))),
            ("KS_E4M3", str(1 + E4M3.index(stored))),
        ),
        matrix_dtypes=_F16 | _BF16 | {stored},
        fp8_dtypes=frozenset({stored}),
        tiles=_with_stored(tiles, stored, through_registers),
        options=(*OPTIONS, *LIBRARY),
    )


ROWS = {
    r.arch: r
    for r in (
        _row("host", False, TILES, DType.float8_e4m3fn),
        _row("host-registers", True, TILES_THROUGH_REGISTERS, DType.float8_e4m3fnuz),
    )
}


def row(arch: str) -> ArchRow:
    """The arch's row; raises UnknownName with those there are."""
    return of_arch(ROWS, arch, "Name one of these")
