"""Tile shapes of the shared kernels for float32 multiplied in TF32; see ``tiles``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kernelseam.descriptors.common.precision import PRECISIONS
from kernelseam.dtypes import DType
from kernelseam.kernels import AttentionTile, BackwardTile, GemmTile

_SINGLE = frozenset({DType.float32})


_GEMM = {
    "tf32": (
        (128, 128, 2, 2, 3, 2, True, 2.6),
        (128, 64, 2, 2, 3, 2, False, 2.2),
        (64, 64, 2, 2, 3, 3, False, 1.6),
        (32, 32, 1, 2, 2, 8, False, 0.6),
    ),
    "tf32x3": (
        (128, 64, 4, 2, 3, 1, False, 0.54),
        (64, 64, 2, 2, 3, 2, False, 0.59),
        (32, 32, 1, 2, 2, 6, False, 0.48),
    ),
}
_OF_GEMM = ("bm", "bn", "warps_m", "warps_n", "stages", "min_blocks", "plain", "rate")
"""Rates of float32's plain units; the split's are an H200's, where TF32's are less than half of
these, as mma.sync's are beside wgmma's."""

_ATTENTION = (
    (32, 4, 16, 64, 1, 3, 1, True, 0.68),
    (64, 4, 16, 64, 1, 2, 1, True, 0.78),
    (64, 4, 16, 32, 2, 2, 1, False, 0.70),
    (128, 4, 16, 64, 1, 2, 1, True, 0.80),
    (128, 4, 16, 16, 2, 2, 1, False, 0.55),
    (256, 8, 16, 32, 1, 1, 1, True, 0.70),
    (256, 8, 16, 16, 1, 1, 2, False, 0.45),
    (256, 4, 16, 16, 1, 1, 2, False, 0.40),
)
_OF_ATTENTION = (
    *("max_dim", "warps", "rows", "bn", "stages", "min_blocks", "column_warps", "plain", "rate"),
)
"""Rates of the split products: an H200's rounded products take two fifths of their time. Of one
stage keys and values share it."""

_ATTENTION_BWD = (
    (64, 8, 32, 64, 2, 32, 0, True),
    (64, 4, 32, 32, 2, 16, 0, False),
    (128, 8, 32, 64, 4, 16, 0, True),
    (128, 8, 32, 32, 4, 16, 0, False),
    (128, 4, 16, 16, 2, 0, 0, True),
    (128, 4, 16, 16, 4, 0, 0, False),
    (256, 8, 16, 16, 4, 0, 0, True),
    (256, 8, 16, 16, 8, 0, 0, False),
    (64, 8, 32, 64, 2, 32, 16, True),
    (64, 4, 32, 32, 2, 16, 16, False),
    (128, 8, 32, 64, 4, 16, 32, True),
    (128, 8, 32, 32, 4, 16, 16, False),
)
_OF_GRADIENTS = (
    *("max_dim", "warps", "rows", "step", "column_warps", "score_rows", "query_rows", "plain"),
)
"""Those in order have a kernel for keys and one for queries."""


def _named(columns: tuple[str, ...], row: tuple[Any, ...], **more: Any) -> dict[str, Any]:
    return {"dtypes": _SINGLE, **dict(zip(columns, row, strict=True)), **more}


# a slice's rows fill all banks, as the matrix engine wants it
GEMM = tuple(
    GemmTile(**_named(_OF_GEMM, row, precision=precision, bk=32, persistent=False))
    for precision, rows in _GEMM.items()
    for row in rows
)
_ATTENTION_TILES = tuple(
    AttentionTile(**_named(_OF_ATTENTION, row, score_unroll=1, block_seconds=1e-6))
    for row in _ATTENTION
)
ATTENTION = tuple(
    replace(
        t,
        precision=precision,
        shared_stage=t.stages == 1,
        rate=t.rate if precision == "tf32x3" else 2.5 * t.rate,
    )
    for precision in PRECISIONS
    for t in _ATTENTION_TILES
)
ATTENTION_BWD = tuple(
    BackwardTile(
        **_named(_OF_GRADIENTS, row, precision=precision, stages=2, unroll=2, apart=not row[6])
    )
    for precision in PRECISIONS
    for row in _ATTENTION_BWD
)


def gradients(blackwell: bool) -> tuple[BackwardTile, ...]:
    """Those of gradients. Split products of 16 rows by two warps spill on Blackwell's archs (nvrtc
    13.5: 8 to 12 bytes), where four warps share the rows."""
    return tuple(
        t
        for t in ATTENTION_BWD
        if not (
            blackwell and (t.precision, t.rows, t.column_warps, t.max_dim) == ("tf32x3", 16, 2, 128)
        )
    )
